"""`python -m breakeven`."""

if __name__ == "__main__":
    from breakeven.cli import main

    raise SystemExit(main())

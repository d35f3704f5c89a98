"""The process that `llamacpp.start_local` starts: xllamacpp's server, alive as long as its parent.

Prints one JSON line, `{"port": ..., "url": ...}`, when it answers. SIGTERM, SIGINT and the end of file on a
piped standard input end it at once, requests in flight included: there is nothing to save, and the library's
own shutdown first waits for the step that is running.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import select
import signal
import stat
import sys
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from breakeven.engines.llamacpp import SPECULATIONS

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal comes. Returns 1, the reason being in the log, if the server doesn't start."""
    options = _parse(argv)
    _die_by_default()
    _die_with_parent()
    import xllamacpp  # type: ignore[import-untyped, import-not-found, unused-ignore] # ships no stubs

    try:
        server = xllamacpp.Server(_params(xllamacpp, options))
    except RuntimeError as error:  # all that it raises; llama.cpp has logged why
        print(error, file=sys.stderr)
        return 1
    url = server.listening_address  # the constructor returns when the model is loaded and the port answers
    print(json.dumps({"port": urlsplit(url).port, "url": url}), flush=True)
    while True:
        signal.pause()


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="breakeven.engines.llamacpp_server", description=__doc__)
    parser.add_argument("--model", required=True, help="GGUF file")
    parser.add_argument("--alias", required=True, help="the model's name in the API")
    parser.add_argument("--port", type=int, default=0, help="0: one that is free")
    parser.add_argument("--slots", type=int, required=True, help="requests decoded together")
    parser.add_argument("--context", type=int, required=True, help="tokens of all slots together")
    parser.add_argument("--speculation", choices=SPECULATIONS, default="none")
    parser.add_argument("--threads", type=int, default=-1, help="-1: every physical core")
    return parser.parse_args(argv)


def _die_by_default() -> None:
    """Let the kernel end us on SIGINT, as it does on SIGTERM.

    Loading the model holds the interpreter's lock, so a handler of ours would not run for as long.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _die_with_parent() -> None:
    """Have the kernel end us when the other end of a piped standard input closes.

    A pipe in O_ASYNC mode sends SIGIO to its owner when the last writer goes, and SIGIO's default action is
    to terminate. A thread that waits for the end of file could not act while the model is loading.
    """
    stdin = sys.stdin.fileno()
    if not stat.S_ISFIFO(os.fstat(stdin).st_mode):
        return  # a terminal, or /dev/null: somebody runs the server by hand
    fcntl.fcntl(stdin, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(stdin, fcntl.F_SETFL, fcntl.fcntl(stdin, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([stdin], [], [], 0)[0]:  # closed before the mode was set: no signal would come
        sys.exit("the parent is gone")


def _params(xllamacpp: Any, options: argparse.Namespace) -> Any:
    """llama.cpp's defaults, but for what a measurement needs; `options` as parsed by `_parse`."""
    params = xllamacpp.CommonParams()
    params.model.path = options.model
    params.model_alias = {options.alias}
    params.hostnames = ["127.0.0.1"]
    params.port = options.port
    params.n_parallel = options.slots
    params.n_ctx = options.context
    params.cont_batching = True
    # The cache of past prompts in host memory (8 GiB by default) would spare a prompt that comes again its
    # prefill: the later level or arm would win by it. What a slot itself still holds is reused as ever.
    params.cache_ram_mib = 0
    params.endpoint_metrics = True
    params.endpoint_slots = True
    params.endpoint_props = True
    params.cpuparams.n_threads = options.threads
    params.cpuparams_batch.n_threads = options.threads
    params.speculative.types = [_speculative_type(xllamacpp, options.speculation)]
    return params


def _speculative_type(xllamacpp: Any, name: str) -> Any:
    member = "COMMON_SPECULATIVE_TYPE_" + name.upper().replace("-", "_")
    return getattr(xllamacpp.common_speculative_type, member)


if __name__ == "__main__":
    sys.exit(main())

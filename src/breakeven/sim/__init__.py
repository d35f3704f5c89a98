"""A simulated engine in virtual time, which writes the records that the load generator writes.

Statistics are tested on it against a known truth, and a control policy lives its first hours here.

    model.py     what an engine is, as JSON: with steps.py (how long a step takes), prefill, noise, acceptance, lengths
    machine.py   the speed of the machine as a function of absolute virtual time: arms that alternate share it
    answers.py   what a prompt gets: how long an answer, and how far each draft along it would be right
    batch.py     who decodes, and what a step gives them
    engine.py    a step: who takes part, which K, how long; K is a number or asked of a function at each step
    level.py     load/closed.py and load/open.py themselves, in a VirtualLoop, sending to an engine
    run.py       the levels of a run, or two arms A B B A on one machine; as a run on disk
    truth.py     the throughput and the break-even that measurements should find, worked out
    fit.py       the model that measured runs suggest
    command.py   `breakeven simulate`

    loads.py     requests in flight over time: ramp, step, day, burst, a trace; mixes.py: kinds of prompts over time
    ride.py      an engine under such a load, whoever chooses K
    contest.py   `breakeven simulate --profile`: policies on the same engine and load
    worlds.py    step times, acceptance, load and mix drawn at random; stepwise.py: a policy's life in one, by steps
    clairvoyant.py  the most that anybody could make of a world

A request's life: `load.plan` makes it, a loop sends it → `Engine.submit` draws its answer → it waits for room → a step
reads its prompt and gives the first token → steps give it one token and those accepted (`Batch.step`) → the loop
hears of its end and refills the slot → it becomes a `RequestRecord`.
"""

"""What a run would cost on a machine: `main.py ... --plan v4:2x4x4`.

planning/machines.py compiles the real train step, and planning/hlo.py reads the program. The formulas of
planning/costs.py answer where there is no compiler, rank what --search tries, and say which flag would help.
"""

import itertools
import math
import os
import re
import typing
from collections import Counter
from types import SimpleNamespace

import jax

import model
import utils
from collectives import count_slices
from config import settle
from config.batch import divisors
from config.flags import Found
from inference import weights
from planning import costs, hlo, machines
from planning.machines import Machine, TooLarge, parse_machine
from runtime.chips import CHIPS, chip_of
from runtime.files import check_place, write_file, write_json
from runtime.jax_setup import configure_jax
from runtime.messages import UserError, say, size
from runtime.pulse import Pulse
from training.sizes import count_in_words, tokens_in_words, tokens_per_step

COMPILED = 4  # configurations that --search compiles
WORTH = 0.02  # share of a step that a flag must save to be named
MARGIN = 0.1  # share of a device's memory to leave free: so far off the formulas may be
GPU_SHARE = 0.75  # of a GPU's memory, which jax allocates for its programs
CHANGES = 3  # of flags, at most, that are tried to make a step fit
# {flag of a few words that changes how a step is computed, not what: its values}
WAYS = {
    flag: typing.get_args(utils.FIELDS[flag].type)
    for flag in ("remat", "fsdp", "sequence_parallel")
}
SEARCHED = "n_device_axis pp_interleave train_batch_size microbatches".split()
SEARCHED += ["accumulation_steps", *WAYS]


def memory_of(estimate, used):
    """{part: bytes} of peak memory. Of what is `used` in all, if a compiler says that, the rest are temporaries."""
    memory = dict(weights=estimate.weights, optimizer=estimate.optimizer, batch=estimate.batch)
    work = estimate.activations + estimate.workspace
    if used is not None:
        work = used - sum(memory.values())
    activations = min(estimate.activations, work)
    return memory | dict(activations=activations, temporaries=work - activations)


def collectives_of(sent, exposed):
    """The rows of the table, of {(axes, kind): (bytes, times, seconds)} and the exposed seconds, where known."""
    names = ("axes", "kind", "bytes", "times", "seconds", "exposed")
    return [
        dict(zip(names, (*key, *amounts, exposed.get(key))))
        for key, amounts in sorted(sent.items())
    ]


def by_links(rows, key):
    """{links: sum of a key} of the rows of the table of collectives."""
    sums = Counter()
    for row in rows:
        sums[links_of(row["axes"], row["kind"])] += row[key]
    return dict(sums)


def links_of(axes, kind):
    """What a collective travels over, in words."""
    return ("network of " if kind == hlo.ACROSS else "links of ") + "+".join(axes)


def answer(cfg, machine, compiled=None, refused=None):
    """The plan of a validated Config as a `SimpleNamespace`: from the compiler where it was asked, `refused` being its
    TooLarge, else from formulas. On one device and for one step where it does not say otherwise; bytes and seconds."""
    estimate = costs.Estimate(cfg, machine)
    used, limit = None, machine.chip.memory
    flops, computing = estimate.flops, estimate.seconds()
    rows, overlapped = collectives_of(estimate.sent, {}), None
    if compiled:
        used = compiled.arguments + compiled.temporaries
        program = costs.Program(compiled.text, cfg, machine)
        flops = program.flops
        computing = {"matrix products": program.products, "memory": program.others}
        rows = collectives_of(program.collectives, program.exposed)
        overlapped = by_links(rows, "exposed")
        overlapped["step"] = program.overlapped()
        overlapped["further round"] = costs.further_round(program, compiled.text)
    elif refused:
        used, limit = refused.args
    memory = memory_of(estimate, used)
    memory |= dict(total=sum(memory.values()), limit=limit)
    seconds = computing | by_links(rows, "seconds")
    # a CPU's program on one device: XLA estimates none of it
    step = sum(seconds.values()) or math.nan
    tokens = tokens_per_step(cfg)
    of_model = model.flops_per_token(cfg) * tokens / machine.n
    hours = step * cfg.run.training_steps / 3600
    return SimpleNamespace(
        cfg=cfg,
        program=compiled,
        machine=machine.name,
        devices=machine.n,
        mesh=estimate.split,
        flags={flag: utils.flatten(cfg)[flag] for flag in SEARCHED},
        compiled=compiled is not None,
        parameters=dict(zip(("total", "active", "embedding"), model.count_params(cfg))),
        tokens=tokens,  # on all devices
        memory=memory,
        fits=memory["total"] <= memory["limit"],
        flops=dict(program=flops, model=of_model),  # of matrix products
        collectives=rows,
        seconds=seconds | dict(step=step),  # nothing overlaps
        overlapped=overlapped,  # exposed seconds, as the compiler scheduled it
        bubble=estimate.bubble,  # share of the pipeline's ticks in which a stage idles
        tokens_per_second=tokens / step,  # of all devices
        mfu=of_model / step / machine.chip.peak,
        hours=hours,
        chip_hours=hours * machine.n,
        bound=max(seconds, key=seconds.get),
    )


def report(a, machine):
    """The plan in words, as a list of lines."""
    cfg, memory, seconds = a.cfg, a.memory, a.seconds
    parts = [name for name, t in seconds.items() if name != "step" and t >= 5e-4]
    lines = [
        f"{cfg.run.preset} on {machine.name}: {a.devices} x {machine.chip.kind}, mesh (dp, pp, tp) = "
        f"{cfg.run.n_device_axis}",
        f"batch        {tokens_in_words(cfg)}",
        f"parameters   {count_in_words(cfg)}",
        f"memory       {in_parts(memory)}",
        f"             {size(memory['total'])} of a chip's {size(memory['limit'])}",
        f"operations   {a.flops['program'] / 1e12:.2f} TFLOP of matrix products per chip, "
        f"{a.flops['program'] / a.flops['model']:.2f} x the model's own",
        *collectives_table(a),
        f"step         {seconds['step']:.3f} s: {', '.join(f'{name} {seconds[name]:.3f}' for name in parts)}",
    ]
    if a.overlapped:
        waited = a.overlapped
        waits = [f"{x} {waited[x]:.3f} of {seconds[x]:.3f}" for x in parts if x in waited]
        exposed = ", ".join(waits) or "nothing"
        lines.append(f"overlapped   {waited['step']:.3f} s, of which exposed: {exposed}")
        if more := waited["further round"]:
            lines.append(
                f"uneven load  {more:.3f} s more for each further round of all layers' experts"
            )
    return [
        *lines,
        f"             {a.tokens_per_second:,.0f} tokens/s, MFU {a.mfu:.1%}, pipeline bubble {a.bubble:.1%} of ticks",
        f"run          {a.hours:,.1f} hours, {a.chip_hours:,.0f} chip-hours",
        f"bound by     {a.bound}",
    ]


def collectives_table(a):
    """Lines: the collectives of an `answer` that take a thousandth of their sum or more, the slowest first."""
    lines = []
    total = sum(row["seconds"] for row in a.collectives)
    for row in sorted(a.collectives, key=lambda row: -row["seconds"]):
        if row["seconds"] > 1e-3 * total:
            lines.append(
                f"{'':<13}{'+'.join(row['axes']):<10} {row['kind']:<18} {row['bytes'] / 1e6:>10,.1f} MB "
                f"{row['times']:>8,.0f} {row['seconds']:>8.4f}"
            )
    headings = "collectives  axes       kind               sent per chip    times  seconds"
    return [headings, *lines] if lines else []


def memory_share_of(machine):
    """Config -> the share of a device's memory that a step of it needs by the formulas; at most 1 leaves some room."""
    room = (1 - MARGIN) * (GPU_SHARE if machine.chip.gpu else 1) * machine.chip.memory
    return lambda cfg: answer(cfg, machine).memory["total"] / room


def fitted(cfg, n, **flags):
    """`cfg` with other flags and the same global batch, validated for n devices; None where they do not go together."""
    rounds = dict(pp_interleave=0) if "n_device_axis" in flags else {}  # as many as the mesh allows
    new = utils.replace(cfg, **rounds | flags)
    parts = new.run.n_device_axis[0] * new.run.accumulation_steps
    train = cfg.data.global_batch_size // parts
    if train * parts != cfg.data.global_batch_size:
        return None
    try:
        # validation is no part of the step: it takes any batch that fits
        return settle.validate(utils.replace(new, train_batch_size=train, val_batch_size=0), n)
    except UserError:
        return None


def meshes(cfg, n):
    """The shapes (dp, pp, tp) of n devices that the model can be spread over."""
    for pp in divisors(math.gcd(cfg.model.blocks, n)):
        for tp in divisors(n // pp):
            yield n // pp // tp, pp, tp


def variants(cfg, n):
    """Every configuration that --search considers, of the same global batch."""
    total = cfg.data.global_batch_size // cfg.run.accumulation_steps
    found = []
    for dp, pp, tp in meshes(cfg, n):
        values = WAYS | dict(
            n_device_axis=[(dp, pp, tp)],
            microbatches=divisors(max(1, total // dp)),
            pp_interleave=divisors(cfg.model.blocks // pp) if pp > 1 else [1],
        )
        if tp == 1:  # no sequences to be split
            values["sequence_parallel"] = [cfg.model.sequence_parallel]
        for row in itertools.product(*values.values()):
            found.append(fitted(cfg, n, **dict(zip(values, row))))
    return list(filter(None, found))


def changed(old, new):
    """The flags that make `new` of `old`, as on a command line. Whoever gives train_batch_size must give the
    accumulation steps too, or they are 1."""
    before = utils.flatten(old)
    now = utils.flatten(new)
    flags = [flag for flag in SEARCHED if now[flag] != before[flag]]
    if "train_batch_size" in flags and now["accumulation_steps"] > 1:
        flags = [*dict.fromkeys([*flags, "accumulation_steps"])]
    words = [f"--{flag} {now[flag]}" for flag in flags]
    return re.sub("[(),]", "", " ".join(words))  # of a mesh


def neighbors(cfg, n):
    """The configurations that one change makes of `cfg`, of a flag or of the mesh, validated for n devices."""
    batch = cfg.data.train_batch_size
    values = WAYS | dict(
        pp_interleave=divisors(cfg.model.blocks // cfg.run.n_device_axis[1]),
        microbatches=divisors(batch),
        accumulation_steps=divisors(batch * cfg.run.accumulation_steps),
        n_device_axis=meshes(cfg, n),
    )
    changes = [fitted(cfg, n, **{flag: value}) for flag in values for value in values[flag]]
    return [new for new in changes if new not in (None, cfg)]


def advise(a, machine):
    """One sentence: the single change that saves most time, or what would make the step fit, by the formulas."""
    cfg = a.cfg
    memory = a.memory
    spare = memory["limit"] - memory["total"]
    if spare < 0:
        lacks = f"it needs {size(-spare)} more than a chip's {size(memory['limit'])}"
        return f"does not fit: {lacks}; {what_would_fit(cfg, machine, memory)}"
    now = answer(cfg, machine)
    best = cfg
    saved = WORTH
    for new in neighbors(cfg, machine.n):
        other = answer(new, machine)
        saves = 1 - other.seconds["step"] / now.seconds["step"]
        if saves > saved and other.memory["total"] - now.memory["total"] <= spare:
            best, saved = new, saves
    if best == cfg:
        return f"no single flag helps by more than {WORTH:.0%}, by the formulas"
    return f"{changed(cfg, best)} would help most: by {saved:.0%} of the step, by the formulas"


def smaller(cfg, machine, memory):
    """(Config, bytes that it needs) of the same global batch that fits by the formulas with some room left, or None.
    memory: of `cfg`, as `answer` has it. One change after the other is made, the one that saves most memory, until one
    suffices: then the fastest of these."""
    limit = memory["limit"]
    # where the formulas say too little of `cfg`, they say too little of others, by the same factor
    lacks = max(0, limit - memory["total"])
    off = max(1, (working(memory) + lacks) / working(answer(cfg, machine).memory))
    old = cfg
    for _ in range(CHANGES):
        tried = []  # (bytes that it needs, seconds of a step, Config)
        for new in neighbors(old, machine.n):
            a = answer(new, machine)
            needs = a.memory["total"] + (off - 1) * working(a.memory)
            tried.append((needs, a.seconds["step"], new))
        fits = [one for one in tried if one[0] <= (1 - MARGIN) * limit]
        if fits:
            needs, _, new = min(fits, key=lambda one: one[1])
            return new, needs
        old = min(tried, key=lambda one: one[0])[2]
    return None


def working(memory):
    """Bytes of what a step works with beside what it is given: of this the formulas are not exact."""
    return memory["activations"] + memory["temporaries"]


def what_would_fit(cfg, machine, memory):
    """Words: the flags that make a step fit which takes so much `memory`, or that there are none."""
    found = smaller(cfg, machine, memory)
    if not found:
        return "no flags would make it fit, by the formulas; take more devices or a smaller model"
    new, used = found
    return f"{changed(cfg, new)} would make it fit, by the formulas: {size(used)}"


def in_parts(memory):
    """Words: what a device holds, of {part: bytes}."""
    parts = [part for part in memory if part not in ("total", "limit")]
    return ", ".join(f"{part} {size(memory[part])}" for part in parts)


def machine_of(devices, memory=None):
    """The `Machine` of devices that jax has found. memory: bytes of one; None: those that a program may use now."""
    processes = len({device.process_index for device in devices})
    slices = count_slices(devices)
    first = devices[0]
    machine = machine_of_kind(first.device_kind, first.platform, len(devices), processes, slices)
    memory = memory or memory_limit() or machine.chip.memory
    return machine._replace(chip=machine.chip._replace(memory=memory))


def machine_of_kind(kind, platform, n, processes, slices):
    """The `Machine` of n devices of a kind, as jax calls it. Speeds of a kind that is not known are those of another,
    which will do to compare configurations."""
    chip = chip_of(kind) or CHIPS["A100" if platform == "gpu" else "v4"]
    return Machine(kind, chip, n, processes if chip.gpu else slices, platform=platform)


def memory_limit():
    """Bytes that a program may use on a device here, None: not known. Simulated devices share the machine's."""
    device = jax.local_devices()[0]
    if device.platform != "cpu":
        return (device.memory_stats() or {}).get("bytes_limit")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return memory / jax.local_device_count()


def explain(cfg, machine, message):
    """One sentence for jax's error of memory: what a device holds in a step, and which flags would make it fit."""
    a = answer(cfg, machine, refused=machines.too_large(message))
    used, limit = (size(a.memory[key]) for key in ("total", "limit"))
    needs = f"a device has {limit} and a step needs {used} of it ({in_parts(a.memory)})"
    return f"out of memory: {needs}; {what_would_fit(cfg, machine, a.memory)}."


def search(cfg, machine, compiler):
    """The `answer` of the best configuration of every mesh, the fastest first; a `compiler` checks the best of them."""
    best = {}
    tried = variants(cfg, machine.n)
    for new in tried:
        a = answer(new, machine)
        mesh = new.run.n_device_axis
        if mesh not in best or rank(a) < rank(best[mesh]):
            best[mesh] = a
    found = sorted(best.values(), key=rank)
    if not found:
        raise UserError(
            f"--search: no mesh of {machine.n} devices fits these flags; a --global_batch_size with more divisors than "
            f"{cfg.data.global_batch_size} may help."
        )
    say(f"{len(tried):,} configurations on {len(found)} meshes ranked by formulas")
    if not compiler:
        return found
    for i, a in enumerate(found[:COMPILED]):
        if a.fits:
            say(f"compiling the best on {a.cfg.run.n_device_axis}")
            found[i] = compiled_answer(a.cfg, machine)
    return sorted(found, key=lambda a: (not a.fits, not a.compiled, *rank(a)))


def rank(a):
    """What --search sorts by: what fits by its time, what does not by its memory."""
    return not a.fits, a.seconds["step"] if a.fits else a.memory["total"]


def table(found):
    """The answers of `search` as lines."""
    row = "{:>4} {:>3} {:>3} {:>6} {:>6} {:>6} {:>6} {:>9} {:>8} {:>6} {:>6}  {:<9} {}"
    headings = "dp pp tp rounds micro remat fsdp sequences step MFU GiB by".split()
    lines = [row.format(*headings, "").rstrip()]
    for a in found:
        cells = [
            *a.mesh.values(),
            *(a.flags[flag] for flag in ("pp_interleave", "microbatches", *WAYS)),
            f"{a.seconds['step']:.3f}",
            f"{a.mfu:.1%}",
            f"{a.memory['total'] / 2**30:.1f}",
            "compiler" if a.compiled else "formulas",
            "" if a.fits else "does not fit",
        ]
        lines.append(row.format(*cells).rstrip())
    return lines


def compiled_answer(cfg, machine):
    """The `answer` from the compiler, also of a step that does not fit."""
    try:
        return answer(cfg, machine, machines.ask_compiler(cfg, machine))
    except TooLarge as e:
        return answer(cfg, machine, refused=e)


def planned_config(flags, machine):
    """The configuration that is planned for. Raises UserError."""
    run = flags.cfg.run
    if run.n_devices not in (0, machine.n):
        raise UserError(f"--n_devices {run.n_devices}: --plan {machine.name} has {machine.n}.")
    check_place(flags.cfg.plan.plan_json, "plan_json")
    of_weights = weights.open_weights(run.init_from)[0] if run.init_from else {}
    # no cache: what was compiled for devices that are not there cannot be read back
    flags = flags.with_given(n_devices=0, compilation_cache="")
    found = Found(
        machine.n,
        device_kind=machine.chip.kind,
        memory_share=memory_share_of(machine),
        weights=of_weights,
    )
    cfg = settle.settle(flags, found)
    if cfg.model.document_mask:
        cfg = utils.replace(cfg, end_of_text=0)  # any token will do
    return cfg


def main(flags):
    """Print the plan of the run that the flags describe, and write --plan_json. Returns 3 where it does not fit."""
    asked = flags.cfg.plan
    machine = parse_machine(asked.plan)
    if asked.plan != machine.name:
        say(f"{asked.plan} is {machine.name}, {machine.n} x {machine.chip.name}")
    cfg = planned_config(flags, machine)
    configure_jax(cfg)
    compiler = not asked.by_formulas and machines.has_compiler(machine)
    if compiler:
        machines.devices_of(machine)  # a slice that does not exist is refused before the search
    with Pulse(f"planning for {machine.name}"):
        if asked.search:
            found = search(cfg, machine, compiler)
        elif compiler:
            say(f"compiling the step for {machine.name}")
            found = [compiled_answer(cfg, machine)]
        else:
            found = [answer(cfg, machine)]
    a = found[0]

    if not compiler and not asked.by_formulas:
        install = machines.INSTALL[machine.platform]
        print(f"{machine.compiler} is not installed ({install}): these are the formulas' numbers")
    if asked.search:
        print("\n".join(table(found)))
        print(f"the fastest: {changed(cfg, a.cfg) or 'the flags as given'}")
    print("\n".join(report(a, machine)), flush=True)
    advice = advise(a, machine)
    print(f"next         {advice}", flush=True)
    if asked.plan_json:
        content = as_json(a) | dict(advice=advice)
        if asked.search:
            content["search"] = [as_json(other) for other in found]
        write_json(asked.plan_json, content)
        if a.program and asked.plan_json.endswith(".json"):
            write_file(asked.plan_json.removesuffix(".json") + ".hlo", a.program.text)
    return 0 if a.fits else 3


def as_json(a):
    """An `answer` as --plan_json writes it."""
    return {name: value for name, value in vars(a).items() if name not in ("cfg", "program")}

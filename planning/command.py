"""`main.py ... --plan v4:2x4x4`: print what a run would cost on a machine, and write it as JSON."""

import functools

import utils
from config import settle
from config.flags import Found
from inference import weights
from planning import machines
from planning.advice import WAYS, advise, changed_flags, memory_in_words, variants
from planning.machines import TooLarge, parse_machine
from planning.plan import as_json, make_plan, memory_share
from runtime.files import check_writable, write_file, write_json
from runtime.jax_setup import configure_jax
from runtime.messages import UserError, say, size
from runtime.pulse import Pulse
from training.sizes import count_in_words, tokens_in_words

COMPILED = 4  # number of the best configurations that --search compiles


def main(flags):
    """Print the plan of the run that the flags describe, and write --plan_json. Returns 3 where it does not fit."""
    asked = flags.cfg.plan
    machine = machine_of_flag("plan", asked.plan)
    cfg = planned_config(flags, machine)
    configure_jax(cfg)
    compiler = not asked.by_formulas and machines.has_compiler(machine)
    if compiler:
        # before the search, so that a slice that does not exist is refused at once
        machines.devices_of(machine)
    with Pulse(f"planning for {machine.name}"):
        if asked.search:
            found = search(cfg, machine, compiler)
        elif compiler:
            say(f"compiling the step for {machine.name}")
            found = [compiled_plan(cfg, machine)]
        else:
            found = [make_plan(cfg, machine)]
    plan = found[0]

    if not compiler and not asked.by_formulas and machine.platform in machines.INSTALL:
        install = machines.INSTALL[machine.platform]
        print(f"{machine.compiler} is not installed ({install}): these are the formulas' numbers")
    if asked.search:
        print("\n".join(table(found)))
        print(f"the fastest: {changed_flags(cfg, plan.cfg) or 'the flags as given'}")
    print("\n".join(report(plan)), flush=True)
    advice = advise(plan)
    print(f"next         {advice}", flush=True)
    if asked.plan_json:
        content = as_json(plan) | dict(advice=advice)
        if asked.search:
            content["search"] = [as_json(other) for other in found]
        write_json(asked.plan_json, content)
        if plan.compiled and asked.plan_json.endswith(".json"):
            write_file(asked.plan_json.removesuffix(".json") + ".hlo", plan.compiled.text)
    return 0 if plan.fits else 3


def machine_of_flag(flag, name):
    """The `Machine` that the value of --plan or --design names; it is printed where that is another name. Raises
    UserError."""
    try:
        machine = parse_machine(name)
    except UserError as e:
        raise e.renamed(plan=f"--{flag}") from None
    if name != machine.name:
        say(f"{name} is {machine.name}, {machine.n} x {machine.chip.name}")
    return machine


def planned_config(flags, machine):
    """The configuration to plan, validated for the machine. Raises UserError."""
    run = flags.cfg.run
    if run.n_devices not in (0, machine.n):
        raise UserError(
            f"--plan {machine.name} has {machine.n}", flag="n_devices", value=run.n_devices
        )
    check_writable(flags.cfg.plan.plan_json, "plan_json")
    of_weights = weights.open_weights(run.init_from)[0] if run.init_from else {}
    # no cache: programs compiled for devices that do not exist here cannot be read from it
    flags = flags.with_given(n_devices=0, compilation_cache="")
    found = Found(
        machine.n,
        device_kind=machine.chip.jax_name,
        memory_share=functools.partial(memory_share, machine=machine.as_a_run_has_it()),
        weights=of_weights,
    )
    cfg = settle.settle(flags, found)
    if cfg.model.document_mask:
        cfg = utils.replace(cfg, end_of_text=0)  # the plan does not depend on which token it is
    return cfg


def compiled_plan(cfg, machine, limit=0):
    """The `Plan` by the compiler, also of a step that does not fit. limit: of `machines.ask_compiler`."""
    try:
        return make_plan(cfg, machine, machines.ask_compiler(cfg, machine, limit))
    except TooLarge as e:
        return make_plan(cfg, machine, refused=e)


def search(cfg, machine, compiler):
    """The `Plan`s of the best configuration of every mesh, the fastest first. compiler: whether to compile the best
    ones."""
    tried = variants(cfg, machine.n)
    found = best_of_meshes(tried, machine)
    if not found:
        raise UserError(
            f"no mesh of {machine.n} devices fits these flags; a --global_batch_size with more divisors than "
            f"{cfg.data.global_batch_size} may help",
            flag="search",
        )
    say(f"{len(tried):,} configurations on {len(found)} meshes ranked by formulas")
    if not compiler:
        return found
    for i, plan in enumerate(found[:COMPILED]):
        if plan.fits:
            say(f"compiling the best on {plan.cfg.run.n_device_axis}")
            found[i] = compiled_plan(plan.cfg, machine)
    return sorted(found, key=lambda plan: (not plan.fits, not plan.compiled, *rank(plan)))


def best_of_meshes(tried, machine):
    """The `Plan`s by formulas of the best Config of each mesh among those that were `tried`, the fastest first."""
    best = {}
    for cfg in tried:
        plan = make_plan(cfg, machine)
        mesh = cfg.run.n_device_axis
        if mesh not in best or rank(plan) < rank(best[mesh]):
            best[mesh] = plan
    return sorted(best.values(), key=rank)


def rank(plan):
    """The key by which --search sorts: plans that fit come first, by their time, then the others, by their memory."""
    return not plan.fits, plan.step if plan.fits else plan.memory.total


def table(found):
    """The plans of `search` as a table, a list of lines."""
    row = "{:>4} {:>3} {:>3} {:>6} {:>6} {:>6} {:>6} {:>9} {:>8} {:>6} {:>6}  {:<9} {}"
    headings = "dp pp tp rounds micro remat fsdp sequences step MFU GiB by".split()
    lines = [row.format(*headings, "").rstrip()]
    for plan in found:
        cells = [
            *plan.mesh.values(),
            *(plan.searched[flag] for flag in ("pp_interleave", "microbatches", *WAYS)),
            f"{plan.step:.3f}",
            f"{plan.mfu:.1%}",
            f"{plan.memory.total / 2**30:.1f}",
            "compiler" if plan.compiled else "formulas",
            "" if plan.fits else "does not fit",
        ]
        lines.append(row.format(*cells).rstrip())
    return lines


def report(plan):
    """A `Plan` in words, as a list of lines."""
    cfg = plan.cfg
    machine = plan.machine
    seconds = plan.seconds
    parts = [name for name, t in seconds.items() if t >= 5e-4]
    lines = [
        f"{cfg.run.preset} on {machine.name}: {machine.n} x {machine.chip.jax_name}, mesh (dp, pp, tp) = "
        f"{cfg.run.n_device_axis}",
        f"batch        {tokens_in_words(cfg)}",
        f"parameters   {count_in_words(cfg)}",
        f"memory       {memory_in_words(plan.memory)}",
        f"             {size(plan.memory.total)} of a chip's {size(plan.memory_limit)}",
        f"operations   {plan.flops / 1e12:.2f} TFLOP of matrix products per chip, "
        f"{plan.flops / plan.model_flops:.2f} x the model's own",
        *collectives_table(plan.collectives),
        f"step         {plan.step:.3f} s: {', '.join(f'{name} {seconds[name]:.3f}' for name in parts)}",
    ]
    if plan.overlap:
        lines += overlap_lines(plan, parts)
    return [
        *lines,
        f"             {plan.tokens_per_second:,.0f} tokens/s, MFU {plan.mfu:.1%}, "
        f"pipeline bubble {plan.bubble:.1%} of ticks",
        f"run          {plan.hours:,.1f} hours, {plan.hours * machine.n:,.0f} chip-hours",
        f"bound by     {plan.bound}",
    ]


def overlap_lines(plan, parts):
    """A list of lines about the step as its compiler scheduled it. parts: those of `plan.seconds` that are long enough
    to print."""
    exposed = plan.overlap.exposed
    waits = [f"{x} {exposed[x]:.3f} of {plan.seconds[x]:.3f}" for x in parts if x in exposed]
    waited = ", ".join(waits) or "nothing"
    lines = [f"overlapped   {plan.overlap.step:.3f} s, of which exposed: {waited}"]
    if more := plan.overlap.further_round:
        lines.append(
            f"uneven load  {more:.3f} s more for each further round of all layers' experts, or for larger buckets"
        )
    return lines


def collectives_table(collectives):
    """A list of lines: the `Collective`s that take more than a thousandth of the seconds of all, the slowest first."""
    lines = []
    total = sum(one.seconds for one in collectives)
    for one in sorted(collectives, key=lambda one: -one.seconds):
        if one.seconds > 1e-3 * total:
            lines.append(
                f"{'':<13}{'+'.join(one.axes):<10} {one.kind:<18} {one.bytes / 1e6:>10,.1f} MB "
                f"{one.times:>8,.0f} {one.seconds:>8.4f}"
            )
    headings = "collectives  axes       kind               sent per chip    times  seconds"
    return [headings, *lines] if lines else []

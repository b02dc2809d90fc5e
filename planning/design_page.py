"""`main.py --design v5e-8 --hours 24`: print what planning/design.py chose, a page, and write it as a file of flags.

Comes next: `main.py --config designed.json`, which trains it.
"""

import model
import utils
from planning import ladder, machines, prices
from planning.command import machine_of_flag
from planning.design import (
    LOCAL,
    SPARE,
    budget_of,
    check_asked,
    check_fits,
    chosen,
    designed,
    setting_of,
    text_of,
    training_flags,
    uses_up,
)
from runtime.files import write_json
from runtime.jax_setup import configure_jax
from runtime.messages import duration, short, size
from runtime.pulse import Pulse
from training.sizes import tokens_in_words

# The flags in the file, beside those that a run keeps: what else the design decides.
DECIDED = {"name", "data", "global_batch_size", "training_steps", "warmup_steps", "decay_steps"}
DECIDED |= {"eval_every", "eval_steps", "save_steps"}
DECIDED |= {"n_device_axis", "pp_interleave", "microbatches", "accumulation_steps"}
DECIDED |= {"remat", "fsdp", "sequence_parallel"}


def main(flags):
    """Print the design for the machine, hours and tokens in `flags`, and write its flags into --design_json."""
    asked = flags.cfg.design
    check_asked(flags)
    machine = machine_of_flag("design", asked.design)
    # as with --plan: no device is here, and flags are checked for those of the machine
    flags = flags.with_defaults(plan=machine.name, compilation_cache="")
    configure_jax(flags.cfg)
    compiler = not flags.cfg.plan.by_formulas and machines.has_compiler(machine)
    if compiler:
        machines.devices_of(machine)  # a slice that does not exist is refused at once
    setting = setting_of(flags, machine)
    budget = budget_of(asked, setting)
    with Pulse(f"designing a run for {machine.name}"):
        found = designed(setting, budget, compiler)
        others = {}
        for factor in (0.5, 2):
            others[factor] = chosen(setting, budget.times(factor))
    check_fits(setting, found)
    text = text_of(setting, found.tokens)
    about = dict(machine=machine.name, hours=asked.hours, tokens=found.tokens, make=text.make)
    write_json(asked.design_json, dict(design=about) | flags_in_file(setting, found, text))
    print("\n".join(page(asked, found, text, others)), flush=True)
    return 0


def flags_in_file(setting, found, text):
    """{flag: value} that trains what was designed, whatever preset it is given beside."""
    cfg = found.plan.cfg
    given = setting.flags.given - utils.flags_with(per_process=True)
    names = (utils.KEPT | DECIDED | given) - utils.flags_with(derived=True)
    flags = {flag: value for flag, value in utils.flatten(cfg).items() if flag in names}
    return flags | dict(data=text.folder)


def page(asked, found, text, others):
    """The page that is printed, as a list of lines. text: the `Text`. others: {factor: `Design` of that many times the
    hours or tokens}."""
    plan, cfg = found.plan, found.plan.cfg
    o, m = cfg.optimizer, cfg.model
    dropout = f", dropout {m.dropout_rate:g}" if m.dropout_rate else ""
    by = plan.machine.compiler if plan.compiled else "formulas"
    return [
        f"design       {asked.design}{amount_of(asked)}: written to {asked.design_json}",
        f"model        {model_in_words(cfg, found.active)}",
        f"data         {data_in_words(found, text)}",
        f"batch        {tokens_in_words(cfg)}",
        f"optimizer    {o.optimizer}: rate {o.max_lr:g} after {o.warmup_steps:,} steps of warm-up, then {o.schedule} "
        f"to {o.end_lr:g}; decay {o.weight_decay:g}, momentum {o.muon_momentum:g}{dropout}",
        f"mesh         (dp, pp, tp) = {cfg.run.n_device_axis}, {cfg.data.microbatches} microbatches, "
        f"--remat {m.remat}, --fsdp {m.fsdp}",
        f"memory       {size(plan.memory.total)} of a device's {size(plan.memory_limit)}",
        f"step         {plan.step:.3f} s by {by}: {plan.tokens_per_second:,.0f} tokens/s, MFU {plan.mfu:.1%}",
        *cost_lines(asked, plan, uses_up(text, found)),
        *loss_lines(found, text),
        *[other_line(factor, asked, other) for factor, other in others.items()],
        *first_lines(asked, found, text),
        f"all of it    {program(text)} --config {asked.design_json}",
        f"             bash launcher.sh --config {asked.design_json}          on all hosts of a slice or a cluster",
    ]


def amount_of(asked):
    """The hours and the tokens that were asked for, in words."""
    hours = f", {duration(3600 * asked.hours)}" if asked.hours else ""
    return hours + (f", {short(asked.tokens)} tokens" if asked.tokens else "")


def model_in_words(cfg, active):
    """The size and the shape of the model."""
    m = cfg.model
    total, _, embedding = model.count_params(cfg)
    layers = m.first_layers + m.blocks * m.layers_per_block
    experts = (
        f", {m.n_experts} experts of which a token uses {m.experts_per_token}"
        if m.n_experts
        else ""
    )
    return (
        f"{short(total + embedding)} parameters, of which a token uses {short(active)}: width {m.model_dimension}, "
        f"{layers} layers{experts}, {m.vocab_size:,} tokens of vocabulary"
    )


def data_in_words(found, text):
    """The tokens of a `Design` and where they come from."""
    epochs = found.tokens / text.tokens
    words = f"{short(found.tokens)} tokens, {found.tokens / found.active:.1f} for each of these parameters"
    words += f"; {text.folder}"
    if epochs:
        words += f" has {short(text.tokens)}, so {epochs:.2f} epochs"
    if epochs and not found.sees_enough:
        words += " (little for such a model: more text would help)"
    return words + (f", made by: {text.make}" if text.make and not text.shards else "")


def cost_lines(asked, plan, uses_up_text):
    """The hours of a run, and what its machine costs. uses_up_text: whether it reads its text as often as is of use."""
    machine = plan.machine
    hours = asked.hours or plan.hours / (1 - SPARE)
    lines = [f"run          {duration(3600 * plan.hours)} of steps"]
    if uses_up_text and plan.hours < asked.hours / 2:
        hours = plan.hours / (1 - SPARE)
        lines[0] += "; more would teach nothing on so little text"
    elif asked.hours:
        whole = duration(3600 * asked.hours)
        lines[0] += f"; the rest of {whole} is for all else: starts, evaluation, checkpoints"
    if machine.platform != "cpu":
        price = prices.price_of(machine.chip.name, machine.n // machine.chip.cores, hours)
        lines.append(f"cost         {price.chip_hours:,.0f} chip-hours: {price}")
    return lines


def loss_lines(found, text):
    """The loss that is predicted where the text is that of the ladder."""
    if not text.is_ladders:
        return []
    loss, error = ladder.predicted_loss(model.flops_per_token(found.plan.cfg) * found.tokens)
    return [
        f"loss         {loss:.2f} +- {error:.2f} nats per token held out, by the ladder of docs/rates.md"
    ]


def other_line(factor, asked, other):
    """What half or twice the budget trains."""
    label = "half" if factor < 1 else "twice"
    amount = duration(3600 * asked.hours * factor)
    if not asked.hours:
        amount = "the tokens"
    return (
        f"{label:<13}{amount}: {short(other.active)} parameters for a token, {short(other.tokens)} tokens, "
        f"{duration(3600 * other.plan.hours)} of steps"
    )


def program(text):
    """The command that trains on a `Text`: where its shards are missing and can be made here, one that makes them."""
    return LOCAL if text.make == LOCAL and not text.shards else "python main.py"


def first_lines(asked, found, text):
    """The commands to try first: a tenth of the tokens, at the rate that the recipe has for so few, and at half of
    it."""
    cfg = found.plan.cfg
    short_run = training_flags(cfg, found.tokens / 10, found.active, text)
    changed = {
        flag: value for flag, value in short_run.items() if value != utils.flatten(cfg)[flag]
    }
    words = " ".join(f"--{flag} {value:g}" for flag, value in changed.items() if flag != "max_lr")
    each = duration(360 * found.plan.hours)
    lines = [
        f"first        a tenth of the tokens at two rates, {each} each; if the second ends lower, halve --max_lr"
    ]
    names = []
    for number, rate in enumerate((short_run["max_lr"], short_run["max_lr"] / 2), 1):
        names.append(f"runs/{cfg.run.name}-{number}")
        command = f"{program(text)} --config {asked.design_json} {words} --max_lr {rate:g}"
        lines.append(f"               {command} --name {cfg.run.name}-{number}")
    return [*lines, f"               python tools/compare.py {' '.join(names)}"]

"""`main.py --design v5e-8 --hours 24`: choose the model, its training and its mesh for the machine that a person has.

Before it come planning/recipe.py, the rules of sizes and rates, and planning/plan.py, what a step costs. One number is
searched for, the width of the model: it is the largest whose active parameters see TOKENS_PER_PARAMETER tokens each
within the budget. Everything else follows from it. What comes next is a file of flags, with which `main.py --config`
trains.
"""

import bisect
import json
import math
import re
from typing import NamedTuple

import model
import utils
from config import settle
from config.flags import Flags, Found, without
from config.settle import largest_vocabulary
from planning import machines, prices, recipe
from planning.advice import variants
from planning.command import COMPILED, best_of_meshes, compiled_plan, machine_of_flag
from planning.plan import MARGIN, SEARCHED, Plan, make_plan
from runtime import installation
from runtime.files import check_writable, read_json, write_json
from runtime.jax_setup import configure_jax
from runtime.messages import UserError, say, short, size
from runtime.pulse import Pulse
from shards.listing import manifests
from training.sizes import tokens_in_words

# The share of the hours in which no step runs: compilation, evaluation, checkpoints, a restart or two. And the seconds
# of a start, which count in a run of minutes.
SPARE, START = 0.1, 60
EPOCHS = (
    4  # up to which repeated text is worth almost as much as new text: arXiv:2305.16264, section 6
)
# Share of TOKENS_PER_PARAMETER with which a model is kept whose compiled step is slower than the formulas said.
ENOUGH = 0.85
# The text where nobody gave --data: on accelerators the smallest of these corpora (data/corpora.json) of which EPOCHS
# passes suffice, on a CPU Python's standard library; and the vocabulary for each.
CORPORA = ("fineweb-edu-10BT", "fineweb-edu-100BT")
GPT2_VOCABULARY, SMALL_VOCABULARY = 50_257, 2048
# The flags in the file, beside those that a run keeps: what else the design decides.
DECIDED = {"name", "data", "global_batch_size", "training_steps", "warmup_steps", "decay_steps"}
DECIDED |= {"eval_every", "eval_steps", "save_steps"}
DECIDED |= {"n_device_axis", "pp_interleave", "microbatches", "accumulation_steps"}
DECIDED |= {"remat", "fsdp", "sequence_parallel"}


class Budget(NamedTuple):
    """What a run may use."""

    seconds: float  # of steps; inf: any number
    tokens: float  # to train on; inf: any number

    def times(self, factor):
        """A budget that much larger."""
        return Budget(self.seconds * factor, self.tokens * factor)


class Text(NamedTuple):
    """What a design trains on."""

    folder: str  # --data
    shards: list  # of `listing.manifests`; [] where they are not made yet
    tokens: float  # to train on, in one epoch; inf where that is not known
    make: str  # the command that makes the shards; "" where they are there

    @property
    def vocabulary(self):
        """Tokens of the tokenizer of its shards; 0 where there are none."""
        return largest_vocabulary(self.shards)[1]


class Setting(NamedTuple):
    """What all candidates of a design have in common."""

    flags: Flags  # those of the command line
    machine: machines.Machine
    text: Text
    vocabulary: int
    widths: tuple  # that may be chosen; (0,): the flags give the model


class Design(NamedTuple):
    """A run that was designed."""

    plan: Plan
    width: int  # of its model, one of recipe.WIDTHS; 0: the flags gave the model
    active: int  # parameters that a token uses, with the embedding

    @property
    def tokens(self):
        """Tokens that it trains on."""
        return self.plan.tokens * self.plan.cfg.run.training_steps


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
    text = text_of(setting, found.tokens)
    about = dict(machine=machine.name, hours=asked.hours, tokens=found.tokens)
    write_json(asked.design_json, dict(design=about) | flags_in_file(setting, found, text))
    print("\n".join(page(asked, found, text, others)), flush=True)
    return 0 if has_room(found.plan) else 3


def check_asked(flags):
    """Raises UserError where the flags beside --design say too little, or what a design cannot keep."""
    asked = flags.cfg.design
    if not (asked.hours or asked.tokens or "training_steps" in flags.given):
        raise UserError(
            "needs --hours of the machine beside it, or --tokens to train on",
            flag="design",
            value=asked.design,
        )
    if flags.cfg.optimizer.optimizer != "muon" and "optimizer" in flags.given:
        raise UserError(
            "the rates of a design are those of muon; leave the flag out",
            flag="optimizer",
            value=flags.cfg.optimizer.optimizer,
        )
    for flag in ("train_batch_size", "init_from"):
        if flag in flags.given:
            raise UserError(
                "cannot be part of a design; give it beside --config, with which the run trains",
                flag=flag,
                value=utils.flatten(flags.cfg)[flag],
            )
    path = asked.design_json
    check_writable(path, "design_json")
    if (there := read_json(path)) and "design" not in there:
        raise UserError(
            "holds flags that no design wrote; name another file", flag="design_json", value=path
        )


def setting_of(flags, machine):
    """The `Setting` of a design. Raises UserError where --data has no shards."""
    cfg = flags.cfg
    small = machine.platform == "cpu"
    vocabulary = SMALL_VOCABULARY if small else GPT2_VOCABULARY
    if {"vocab_size", "tokenizer", "preset"} & flags.given:
        vocabulary = cfg.model.vocab_size
    if {"data", "mix"} & flags.given:
        text = text_in(cfg, cfg.data.data)
        if not text.shards:
            raise UserError(
                f"no shards are there; bash run.sh local --design {cfg.design.design} --data TEXT makes them of text",
                flag="data",
                value=cfg.data.data,
            )
    elif small:
        text = text_in(
            cfg, f"data/shards/stdlib-{vocabulary}", "bash run.sh local --config makes it"
        )
    else:
        text = Text("", [], math.inf, "")
    given = {"preset", "architecture", "model_dimension"} & flags.given
    widths = (0,) if given else recipe.WIDTHS
    return Setting(flags, machine, text, text.vocabulary or vocabulary, widths)


def text_in(cfg, folder, make=""):
    """The `Text` in a folder of shards. make: what makes them where they are missing."""
    shards = manifests(utils.replace(cfg, data=folder), "train", "val")
    training = [made for _, path, made in shards if path.endswith("train")]
    if not training or not all(training):  # missing, or shards without a manifest
        return Text(folder, shards, math.inf, "" if shards else make)
    return Text(folder, shards, sum(made["tokens"] for made in training), "")


def budget_of(asked, setting):
    """The `Budget` of a design. Raises UserError where the hours are over before a step runs."""
    seconds = (1 - SPARE) * 3600 * asked.hours - START
    if asked.hours and seconds <= 0:
        least = START / (1 - SPARE) / 3600
        raise UserError(
            f"must be more than {least:.2f}, which a start takes", flag="hours", value=asked.hours
        )
    tokens = min(asked.tokens or math.inf, EPOCHS * setting.text.tokens)
    return Budget(seconds if asked.hours else math.inf, tokens)


def designed(setting, budget, compiler):
    """The `Design` of a budget, by the machine's compiler where that is installed. Raises UserError."""
    found = chosen(setting, budget)
    check_long_enough(setting, budget, found)
    while True:
        found = with_best_mesh(setting, budget, found, compiler)
        at = setting.widths.index(found.width)
        wanted = min(budget.tokens, ENOUGH * recipe.TOKENS_PER_PARAMETER * found.active)
        if at == 0 or (has_room(found.plan) and found.tokens >= wanted):
            return found
        found = candidate(setting, budget, setting.widths[at - 1])


def chosen(setting, budget):
    """The `Design` with the largest model that the budget trains, by formulas."""
    found = {}

    def is_too_large(width):
        design = found[width] = candidate(setting, budget, width)
        enough = design.tokens >= recipe.TOKENS_PER_PARAMETER * design.active
        return not (has_room(design.plan) and enough)

    at = bisect.bisect_left(setting.widths, True, key=is_too_large)
    width = setting.widths[
        max(0, at - 1)
    ]  # the last that is not too large; if all are, the smallest
    return found.get(width) or candidate(setting, budget, width)


def check_long_enough(setting, budget, found):
    """Raises UserError where the hours do not even train the smallest model."""
    wanted = min(budget.tokens, recipe.TOKENS_PER_PARAMETER * found.active)
    if found.tokens >= wanted or found.width != recipe.WIDTHS[0]:
        return
    hours = (wanted / found.plan.tokens_per_second + START) / (1 - SPARE) / 3600
    raise UserError(
        f"the smallest model, of {short(found.active)} parameters, needs {hours:.2g} hours on {setting.machine.name} "
        f"for {recipe.TOKENS_PER_PARAMETER} tokens a parameter",
        flag="hours",
        value=f"{setting.flags.cfg.design.hours:g}",
    )


def candidate(setting, budget, width):
    """The `Design` of a width, by formulas. The batch depends on the tokens, and these on its speed, so a second pass
    settles both."""
    tokens = min(budget.tokens, 1e9)
    for _ in range(2):
        cfg, active = configured(setting, width, tokens)
        plan = fastest(setting, cfg)
        tokens = tokens_within(budget, plan, active)
    return Design(with_tokens(setting, plan, tokens, active), width, active)


def configured(setting, width, tokens):
    """(the Config of a model of that width which trains on that many tokens, its active parameters)."""
    machine, flags = setting.machine, setting.flags
    if width:
        flags = flags.with_defaults(**recipe.model_flags(width, setting.vocabulary))
        flags = flags.with_defaults(n_experts=divisible(flags.cfg.model.n_experts, machine.n))
    found = Found(machine.n, device_kind=machine.chip.jax_name, shards=setting.text.shards)
    flags = settle.settle_model(flags, found, tell=None)
    T = flags.cfg.model.T
    sequences = divisible(recipe.batch_tokens(tokens, T) // T, machine.n)
    batch = dict(global_batch_size=max(sequences, machine.n))
    # little text may shorten the sequences and the batch
    cfg = settle.settle(flags.with_defaults(**batch), found, tell=None)
    active = active_params(cfg)
    flags = flags.with_defaults(T=cfg.model.T, name=name_of(setting.flags.cfg.design))
    flags = flags.with_defaults(**training_flags(cfg, tokens, active))
    return settle.settle(flags, found, tell=None), active


def active_params(cfg):
    """The number of parameters that a token uses, with the embedding."""
    _, active, embedding = model.count_params(cfg)
    return active + embedding


def training_flags(cfg, tokens, active):
    """`recipe.training_flags` of a Config on that many tokens."""
    per_step = cfg.data.global_batch_size * cfg.model.T
    return recipe.training_flags(tokens, per_step, active, cfg.model.T)


def divisible(number, n):
    """The number nearest to `number`, by their ratio, that n devices can divide: n's odd part times a power of two.

    A machine of 8 devices leaves 16 experts as they are. One of 6, whose odd part is 3, makes them 12.
    """
    odd = n // (n & -n)
    return odd * 2 ** max(0, round(math.log2(number / odd)))


def name_of(asked):
    """The name of the run: that of the machine and of its hours or tokens, as in v5e-8-24h."""
    amount = f"{asked.hours:g}h" if asked.hours else f"{short(asked.tokens)}"
    return re.sub(r"[^\w.+=@-]+", "-", f"{asked.design}-{amount}")


def room_of(machine):
    """The machine with the memory that a planned step may need: what a run gets, less what formulas may be off by."""
    machine = machine.as_a_run_has_it()
    return machine._replace(chip=machine.chip._replace(memory=(1 - MARGIN) * machine.chip.memory))


def has_room(plan):
    """Whether a step fits into the memory that a run gets, which is less than a plan's machine may have."""
    return plan.fits and plan.memory.total <= plan.machine.as_a_run_has_it().chip.memory


def fastest(setting, cfg):
    """The fastest `Plan` of a Config by formulas: on its own mesh, or on any other where it does not fit there."""
    shape = cfg.run.n_device_axis
    found = ranked(setting, cfg, [shape])
    if not (found and found[0].fits):
        found = ranked(setting, cfg) or found
    if not found:
        raise UserError(
            f"no mesh of {setting.machine.n} devices fits the flags beside it",
            flag="design",
            value=setting.flags.cfg.design.design,
        )
    return found[0]


def ranked(setting, cfg, shapes=None):
    """The best `Plan` of each mesh, the fastest first, with the flags that were given. shapes: meshes; None: all."""
    kept = setting.flags.given & set(SEARCHED)
    wanted = utils.flatten(cfg)
    tried = []
    for new in variants(cfg, setting.machine.n, shapes):
        values = utils.flatten(new)
        if all(values[flag] == wanted[flag] for flag in kept):
            tried.append(new)
    return best_of_meshes(tried, room_of(setting.machine))


def with_best_mesh(setting, budget, design, compiler):
    """A `Design` with the best of all meshes. compiler: whether the best ones are compiled, until one fits."""
    machine = setting.machine
    found = ranked(setting, design.plan.cfg)
    if not compiler:
        plan = make_plan(found[0].cfg, machine)
    else:
        for one in found[:COMPILED]:
            words = f"width {design.width or one.cfg.model.model_dimension}, mesh {one.cfg.run.n_device_axis}"
            say(f"compiling the step for {machine.name}: {words}")
            plan = compiled_plan(one.cfg, machine)
            if has_room(plan):
                break
    tokens = tokens_within(budget, plan, design.active)
    return design._replace(plan=with_tokens(setting, plan, tokens, design.active))


def tokens_within(budget, plan, active):
    """The tokens of a budget at the speed of a plan, at least a step's; without any limit those that the recipe
    wants."""
    tokens = min(budget.tokens, plan.tokens_per_second * budget.seconds)
    if math.isinf(tokens):
        tokens = recipe.TOKENS_PER_PARAMETER * active
    return max(plan.tokens, tokens)


def with_tokens(setting, plan, tokens, active):
    """A `Plan` whose run trains on that many tokens. The program of a step stays the same."""
    flags = without(setting.flags.given, training_flags(plan.cfg, tokens, active))
    steps = flags.get("training_steps", plan.cfg.run.training_steps)
    if "end_steps" not in setting.flags.given:
        flags["end_steps"] = steps
    return plan._replace(cfg=utils.replace(plan.cfg, **flags))


def text_of(setting, tokens):
    """The `Text` to train on that many tokens: what was given, or else the smallest of CORPORA that is large enough."""
    if setting.text.folder:
        return setting.text
    corpora = json.loads((installation.ROOT / "data/corpora.json").read_text())
    name = next(
        (name for name in CORPORA if EPOCHS * corpora[name]["tokens"] >= tokens), CORPORA[-1]
    )
    found = text_in(setting.flags.cfg, f"data/shards/{name}")
    make = "" if found.shards else f"python data/prepare.py {name}"
    return found._replace(tokens=corpora[name]["tokens"], make=make)


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
    by = plan.machine.compiler if plan.compiled else "formulas"
    return [
        f"design       {asked.design}{amount_of(asked)}: written to {asked.design_json}",
        f"model        {model_in_words(cfg, found.active)}",
        f"data         {data_in_words(found, text)}",
        f"batch        {tokens_in_words(cfg)}",
        f"optimizer    {o.optimizer}: rate {o.max_lr:g} after {o.warmup_steps:,} steps of warm-up, then {o.schedule} "
        f"to {o.end_lr:g}; decay {o.weight_decay:g}, momentum {o.muon_momentum:g}",
        f"mesh         (dp, pp, tp) = {cfg.run.n_device_axis}, {cfg.data.microbatches} microbatches, "
        f"--remat {m.remat}, --fsdp {m.fsdp}",
        f"memory       {size(plan.memory.total)} of a device's {size(plan.memory_limit)}",
        f"step         {plan.step:.3f} s by {by}: {plan.tokens_per_second:,.0f} tokens/s, MFU {plan.mfu:.1%}",
        *cost_lines(asked, plan),
        *[other_line(factor, asked, other) for factor, other in others.items()],
        *first_lines(asked, found),
        "run it       python main.py --config FILE, bash run.sh local --config FILE, or on all hosts bash launcher.sh "
        "--config FILE".replace("FILE", asked.design_json),
    ]


def amount_of(asked):
    """The hours and the tokens that were asked for, in words."""
    hours = f", {asked.hours:g} hours" if asked.hours else ""
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
    return words + (f" ({text.make})" if text.make else "")


def cost_lines(asked, plan):
    """The hours of a run, and what its machine costs."""
    machine = plan.machine
    hours = asked.hours or plan.hours / (1 - SPARE)
    lines = [f"run          {plan.hours:,.2g} hours of steps"]
    if asked.hours:
        lines[0] += (
            f"; the rest of {asked.hours:g} is for compilation, evaluation, checkpoints and restarts"
        )
    if machine.platform != "cpu":
        price = prices.price_of(machine.chip.name, machine.n // machine.chip.cores, hours)
        lines.append(f"cost         {price.chip_hours:,.0f} chip-hours: {price}")
    return lines


def other_line(factor, asked, other):
    """What half or twice the budget trains."""
    label = "half" if factor < 1 else "twice"
    amount = (
        f"{asked.hours * factor:g} hours"
        if asked.hours
        else f"{short(asked.tokens * factor)} tokens"
    )
    return (
        f"{label:<13}{amount}: {short(other.active)} parameters for a token, {short(other.tokens)} tokens, "
        f"{other.plan.hours:,.2g} hours of steps"
    )


def first_lines(asked, found):
    """The commands to try first: a tenth of the tokens, at the rate that the recipe has for so few, and at half of
    it."""
    cfg = found.plan.cfg
    short_run = training_flags(cfg, found.tokens / 10, found.active)
    changed = {
        flag: value for flag, value in short_run.items() if value != utils.flatten(cfg)[flag]
    }
    words = " ".join(f"--{flag} {value:g}" for flag, value in changed.items() if flag != "max_lr")
    lines = [
        f"first        a tenth of the tokens at two rates, {found.plan.hours / 10:.2g} hours each; then compare"
    ]
    names = []
    for number, rate in enumerate((short_run["max_lr"], short_run["max_lr"] / 2), 1):
        names.append(f"runs/{cfg.run.name}-{number}")
        command = f"python main.py --config {asked.design_json} {words} --max_lr {rate:g}"
        lines.append(f"               {command} --name {cfg.run.name}-{number}")
    return [*lines, f"               python tools/compare.py {' '.join(names)}"]

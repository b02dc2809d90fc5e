"""`main.py --design v5e-8 --hours 24`: choose the model, its training and its mesh for the machine that a person has.

Before it come planning/recipe.py, the rules of sizes and rates, and planning/plan.py, what a step costs. One number is
searched for, the width of the model: it is the largest whose active parameters see TOKENS_PER_PARAMETER tokens each
within the budget, or, where the text is too little for that, the largest that reads it EPOCHS times in the hours.
Everything else follows from it. What comes next is a file of flags, with which `main.py --config` trains.
"""

import bisect
import functools
import math
import re
from typing import NamedTuple

import architectures
import model
import utils
from config import little_text, settle
from config.flags import Flags, Found, without
from config.settle import largest_vocabulary
from data.corpora import CORPORA, shards_of
from planning import ladder, machines, recipe
from planning.advice import variants
from planning.command import COMPILED, best_of_meshes, compiled_plan
from planning.plan import MARGIN, SEARCHED, Plan, make_plan, memory_share
from runtime.files import check_writable, read_json
from runtime.messages import UserError, say, short, size
from shards.listing import manifests

# The share of the hours in which no step runs: compilation, evaluation, checkpoints, a restart or two. And the seconds
# of a start, which count in a run of minutes.
SPARE, START = 0.1, 60
# Up to which repeated text is worth almost as much as new text: arXiv:2305.16264, section 6. Hours that are left bring
# more as a larger model than as further epochs (arXiv:2605.01640; dev/log.md, 2026-11-29).
EPOCHS = little_text.EPOCHS
# Active parameters for each token of a text, at most. More gained little for its time (dev/log.md, 2026-11-29).
MOST_PARAMETERS = 40
# A compiler that has not ended by then is not asked further. For a large design the TPU compiler takes five minutes of
# a core, the GPU compiler one.
COMPILE_SECONDS = 600
# The share of TOKENS_PER_PARAMETER that is enough, so that the model next in size is taken where it is nearer to it.
ENOUGH = 0.7
# The text where nobody gave --data: on accelerators the smallest of these corpora (data/corpora.json) of which EPOCHS
# passes suffice, on a CPU Python's standard library; and the vocabulary for each.
TEXTS = ("fineweb-edu-10BT", "fineweb-edu-100BT")
# Tokens in the smallest part of them, so that its validation split, a thousandth, is large enough to measure a loss.
LEAST_TOKENS = 10_000_000
GPT2_VOCABULARY, SMALL_VOCABULARY = 50_257, 1024
LOCAL = "bash run.sh local"  # which makes the shards of the standard library


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
    make: str  # the command that makes the shards; "" where --data named them

    @property
    def is_ladders(self):
        """Whether losses on it are predicted by planning/ladder.py."""
        made = [made for _, _, made in self.shards]
        if not made and self.make == LOCAL:  # which will make this
            made = [dict(source="stdlib", vocab_size=SMALL_VOCABULARY)]
        return bool(made) and all(map(ladder.applies_to, made))

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
    # {(width, sequences of a step): fastest `Plan`} so far, each of which takes a second
    plans: dict


class Design(NamedTuple):
    """A run that was designed."""

    plan: Plan
    width: int  # of its model, one of recipe.WIDTHS; 0: the flags gave the model
    active: int  # parameters that a token uses, with the embedding

    @property
    def tokens(self):
        """Tokens that it trains on."""
        return self.plan.tokens * self.plan.cfg.run.training_steps

    @property
    def sees_enough(self):
        """Whether these are enough for its size."""
        return self.tokens >= ENOUGH * recipe.TOKENS_PER_PARAMETER * self.active


def check_asked(flags):
    """Raises UserError where the flags beside --design say too little, or what a design cannot keep."""
    asked = flags.cfg.design
    if not (asked.hours or asked.tokens or asked.target_loss or "training_steps" in flags.given):
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
        text = text_in(cfg, f"data/shards/stdlib-{vocabulary}", LOCAL)
    else:
        text = Text("", [], math.inf, "")
    given = {"preset", "architecture", "model_dimension"} & flags.given
    widths = (0,) if given else recipe.WIDTHS
    return Setting(flags, machine, text, text.vocabulary or vocabulary, widths, plans={})


def text_in(cfg, folder, make=""):
    """The `Text` in a folder of shards. make: what makes them where they are missing."""
    shards = manifests(utils.replace(cfg, data=folder), "train", "val")
    training = [made for _, path, made in shards if path.endswith("train")]
    if not training or not all(training):  # missing, or shards without a manifest
        return Text(folder, shards, math.inf, make)
    return Text(folder, shards, sum(made["tokens"] for made in training), make)


def budget_of(asked, setting):
    """The `Budget` of a design. Raises UserError where the hours are over before a step runs."""
    seconds = (1 - SPARE) * 3600 * asked.hours - START
    if asked.hours and seconds <= 0:
        least = START / (1 - SPARE) / 3600
        raise UserError(
            f"must be more than {least:.2f}, which a start takes", flag="hours", value=asked.hours
        )
    wanted = asked.tokens or math.inf
    if asked.target_loss:
        wanted = min(wanted, tokens_for(setting, asked.target_loss))
    tokens = min(wanted, EPOCHS * setting.text.tokens)
    return Budget(seconds if asked.hours else math.inf, tokens)


def tokens_for(setting, loss):
    """Tokens of a run that should end with this loss, by planning/ladder.py. Raises UserError where the text is not
    that of the ladder, or no model is large enough."""
    if not setting.text.is_ladders:
        raise UserError(
            f"losses are predicted for Python's standard library in a vocabulary of "
            f"{ladder.record()['corpus']['vocab_size']:,} alone; give --hours or --tokens",
            flag="target_loss",
            value=loss,
        )
    operations = ladder.operations_for(loss)
    for width in setting.widths:
        cfg, active = configured(setting, width, 1e9)
        tokens = recipe.TOKENS_PER_PARAMETER * active
        if model.flops_per_token(cfg) * tokens >= operations:
            return operations / model.flops_per_token(cfg)
    raise UserError("no model here is large enough for that", flag="target_loss", value=loss)


def designed(setting, budget, compiler):
    """The `Design` of a budget, by the machine's compiler where that is installed. Raises UserError."""
    found = chosen(setting, budget)
    check_long_enough(setting, budget, found)
    while True:
        found = with_best_mesh(setting, budget, found, compiler)
        at = setting.widths.index(found.width)
        if at == 0 or (has_room(setting, found.plan) and sees_enough(setting, found)):
            return found
        found = candidate(setting, budget, setting.widths[at - 1])


def chosen(setting, budget):
    """The `Design` with the largest model that the budget trains and that fits, by formulas."""
    found = {}

    def is_too_large(width):
        found[width] = candidate(setting, budget, width)
        return not sees_enough(setting, found[width])

    at = bisect.bisect_left(setting.widths, True, key=is_too_large)
    # the last that is not too large; if all are, the smallest
    for width in reversed(setting.widths[: max(1, at)]):
        design = found.get(width) or candidate(setting, budget, width)
        # whether one fits also depends on how its blocks can be divided, so the next in size may not
        if has_room(setting, design.plan):
            break
    return design


def sees_enough(setting, design):
    """Whether a model trains on enough tokens for its size; where hours were given, also whether it reads all the text
    that there is EPOCHS times, and is not too large for it."""
    asked = setting.flags.cfg.design
    is_of_hours = asked.hours and not (asked.tokens or asked.target_loss)
    is_small = design.active < MOST_PARAMETERS * setting.text.tokens
    return design.sees_enough or bool(is_of_hours and is_small and uses_up(setting.text, design))


def uses_up(text, design):
    """Whether a model reads a `Text` EPOCHS times, but for a last step."""
    return design.tokens > 0.9 * EPOCHS * text.tokens


def check_long_enough(setting, budget, found):
    """Raises UserError where the hours do not even train the smallest model."""
    all_tokens = found.tokens > 0.9 * budget.tokens  # all that there are, but for the last step
    given = "training_steps" in setting.flags.given
    if given or sees_enough(setting, found) or all_tokens or found.width != recipe.WIDTHS[0]:
        return
    wanted = ENOUGH * recipe.TOKENS_PER_PARAMETER * found.active
    hours = (wanted / found.plan.tokens_per_second + START) / (1 - SPARE) / 3600
    raise UserError(
        f"the smallest model, of {short(found.active)} parameters, needs {hours:.2g} hours on {setting.machine.name}",
        flag="hours",
        value=f"{setting.flags.cfg.design.hours:g}",
    )


def check_fits(setting, found):
    """Raises UserError where not even the smallest model fits, or the one that the flags give."""
    if has_room(setting, found.plan):
        return
    which = "the smallest model" if found.width else "the model of the flags beside it"
    limit = setting.machine.as_a_run_has_it().chip.memory
    raise UserError(
        f"{which}, of {short(found.active)} parameters for a token, needs {size(found.plan.memory.total)} of a "
        f"device's {size(limit)} on its best mesh; give a smaller one, or more devices",
        flag="design",
        value=setting.flags.cfg.design.design,
    )


def candidate(setting, budget, width):
    """The `Design` of a width, by formulas. The batch depends on the tokens, and these on its speed, so a second pass
    settles both."""
    tokens = min(budget.tokens, 1e9)
    for _ in range(2):
        cfg, active = configured(setting, width, tokens)
        key = width, cfg.data.global_batch_size
        plan = setting.plans[key] = setting.plans.get(key) or fastest(setting, cfg)
        tokens = tokens_within(setting, budget, plan, active)
    return Design(with_tokens(setting, plan, tokens, active), width, active)


def configured(setting, width, tokens):
    """(the Config of a model of that width which trains on that many tokens, its active parameters)."""
    machine, flags = setting.machine, setting.flags
    if width:
        flags = flags.with_defaults(**recipe.model_flags(width, setting.vocabulary))
        flags = flags.with_defaults(n_experts=divisible(flags.cfg.model.n_experts, machine.n))
    found = Found(
        machine.n,
        device_kind=machine.chip.jax_name,
        # by which a batch that does not fit is divided into accumulation steps
        memory_share=functools.partial(memory_share, machine=machine.as_a_run_has_it()),
        shards=setting.text.shards,
    )
    flags = settle.settle_model(flags, found, tell=None)
    T = flags.cfg.model.T
    sequences = divisible(recipe.batch_tokens(tokens, T) // T, machine.n)
    batch = dict(global_batch_size=max(sequences, machine.n))
    # little text may shorten the sequences and the batch
    cfg = settle.settle(flags.with_defaults(**batch), found, tell=None)
    active = model.active_params(cfg)
    flags = flags.with_defaults(T=cfg.model.T, name=name_of(setting.flags.cfg.design))
    flags = flags.with_defaults(**training_flags(cfg, tokens, active, setting.text))
    return settle.settle(flags, found, tell=None), active


def training_flags(cfg, tokens, active, text):
    """`recipe.training_flags` of a Config on that many tokens of a `Text`, with the dropout and decay that keep it from
    learning little text by heart."""
    m = cfg.model
    per_step = cfg.data.global_batch_size * m.T
    flags = recipe.training_flags(tokens, per_step, active, m.T, m.model_dimension)
    reading = little_text.Reading(text.tokens, tokens, active)
    flags |= little_text.not_by_heart(dict(dropout_rate=0.0) | flags, reading)
    # a preset may be of an architecture that lacks some of them
    return without(architectures.flags_without_choice(m.architecture), flags)


def divisible(number, n):
    """The number nearest to `number`, by their ratio, that n devices can divide: n's odd part times a power of two.

    A machine of 8 devices leaves 16 experts as they are. One of 6, whose odd part is 3, makes them 12.
    """
    odd = n // (n & -n)
    return odd * 2 ** max(0, round(math.log2(number / odd)))


def name_of(asked):
    """The name of the run: that of the machine and of what was asked for, as in v5e-8-24h."""
    amount = "designed"  # by its steps alone
    if asked.hours:
        amount = f"{asked.hours:g}h"
    elif asked.tokens:
        amount = short(asked.tokens)
    elif asked.target_loss:
        amount = f"loss-{asked.target_loss:g}"
    return re.sub(r"[^\w.+=@-]+", "-", f"{asked.design}-{amount}")


def room_of(machine):
    """The machine with the memory that a planned step may need: what a run gets, less what formulas may be off by."""
    machine = machine.as_a_run_has_it()
    return machine._replace(chip=machine.chip._replace(memory=(1 - MARGIN) * machine.chip.memory))


def has_room(setting, plan):
    """Whether a step fits into the memory that a run gets, which on a GPU is not all of it."""
    return plan.memory.total <= setting.machine.as_a_run_has_it().chip.memory


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
            width = design.width or one.cfg.model.model_dimension
            # The compiler may take minutes, so the formulas' answer comes first.
            say(
                f"by formulas: width {width}, mesh {one.cfg.run.n_device_axis}, {one.step:.3f} s a step, "
                f"{size(one.memory.total)} of a device's {size(one.memory_limit)}"
            )
            say(
                "compiling that step: a minute or two for a GPU, five or more for a TPU, at most "
                f"{COMPILE_SECONDS // 60}; --by_formulas skips it"
            )
            plan = compiled_plan(one.cfg, machine, COMPILE_SECONDS)
            if has_room(setting, plan):
                break
    tokens = tokens_within(setting, budget, plan, design.active)
    return design._replace(plan=with_tokens(setting, plan, tokens, design.active))


def tokens_within(setting, budget, plan, active):
    """The tokens of a budget at the speed of a plan, at least a step's; without any limit those that the recipe
    wants. Steps that were given have their own."""
    if "training_steps" in setting.flags.given:
        return plan.tokens * setting.flags.cfg.run.training_steps
    tokens = min(budget.tokens, plan.tokens_per_second * budget.seconds)
    if math.isinf(tokens):
        tokens = recipe.TOKENS_PER_PARAMETER * active
    return max(plan.tokens, tokens)


def with_tokens(setting, plan, tokens, active):
    """A `Plan` whose run trains on that many tokens. The program of a step stays the same."""
    flags = without(setting.flags.given, training_flags(plan.cfg, tokens, active, setting.text))
    steps = flags.get("training_steps", plan.cfg.run.training_steps)
    if "end_steps" not in setting.flags.given:
        flags["end_steps"] = steps
    return plan._replace(cfg=utils.replace(plan.cfg, **flags))


def text_of(setting, tokens):
    """The `Text` to train on that many tokens: what was given, or else the smallest of TEXTS that is large enough, or
    the first part of it."""
    if setting.text.folder:
        return setting.text
    there = {name: CORPORA[name]["tokens"] for name in TEXTS}
    name = next((name for name in TEXTS if EPOCHS * there[name] >= tokens), TEXTS[-1])
    make = f"python data/prepare.py {name}"
    whole = text_in(setting.flags.cfg, shards_of(name), make)
    if whole.shards or tokens > there[name] / 2:
        return whole._replace(tokens=there[name])
    # two digits, upwards, so that designs of about the same length have the same shards
    unit = 10 ** (math.floor(math.log10(tokens)) - 1)
    enough = max(LEAST_TOKENS, unit * math.ceil(tokens / unit))
    make = f"{make} --tokens {enough / 1e6:g}e6"
    return text_in(setting.flags.cfg, shards_of(name, enough), make)._replace(tokens=enough)

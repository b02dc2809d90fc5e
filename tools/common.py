"""What the programs here share: their flags, opening a model, text of tokens."""

import contextlib
import sys
from dataclasses import dataclass
from typing import Literal

import utils
from architectures import architecture
from config import settle
from config.parser import Mesh, argument, flag
from config.program import read_flags
from runtime import interrupts, platforms
from runtime.files import read_json
from runtime.messages import UserError, first_line, one_sentence, warn
from shards import tokenization


@dataclass(frozen=True, kw_only=True)
class Options:
    """Flags of every such program; those of utils.py that have the same name mean the same."""

    model: str = argument()
    """A run directory, local or gs:// or s3://, whose newest sound checkpoint is taken, of a run that overfits the
    best, and with @STEP behind it that of the step; a local folder in the Hugging Face format, or a model of its hub,
    hf://ORGANISATION/NAME, with @REVISION behind it."""
    n_device_axis: Mesh = utils.Run.n_device_axis
    """Mesh shape: dp pp tp, as for main.py; it need not be the one that the model was trained on."""
    n_devices: int = utils.Run.n_devices
    """Devices to use, as for main.py; 0: all that are present."""
    T: int = 0
    """Tokens of a sequence: of a window of text, or of a prompt with its continuation. 0: as many as the model was
    trained with or, for one that was imported, was made for. Rotary models take more, GPT-2 has no positions then."""
    model_dtype: Literal["bfloat16", "float32"] | None = None
    """Type of activations and matrices; None: the one that the model was trained in."""
    start: Literal["auto", "end_of_text", "nothing"] = "auto"
    """What precedes a prompt, or a question of --tasks with a context: the end-of-text token, or nothing. auto: what a
    tokenizer.json puts there; before the prompts of models trained here the end-of-text token."""
    compilation_cache: str = utils.Run.compilation_cache
    """Folder of XLA's persistent compilation cache; empty: none."""


@dataclass(frozen=True, kw_only=True)
class Sample(Options, utils.Sample):
    """Continue prompts with a trained model."""

    prompt: tuple[str, ...] = ()
    """Texts to continue; without one, each line that is typed."""
    inference_batch: int = flag(1, least=1)
    """Samples to draw of each prompt."""
    max_tokens: int | None = flag(None, least=1)
    """Tokens to add to a prompt. None: 64, or as many as fit in the sequence."""
    stop: tuple[str, ...] = ()
    """Strings before which a row ends; the end-of-text token always ends it, and each eos_token_id of a model in the
    Hugging Face format."""
    seed: int = utils.Run.seed
    """Seed of the draws."""


@dataclass(frozen=True, kw_only=True)
class Evaluate(Options):
    """Measure a trained model on shards, text and the tasks of lm_eval."""

    data: tuple[str, ...] = flag((), nonempty=True)
    """Each a folder of shards, or one with such a folder val in it; or text or records, as --source of
    data/tokenize_shards.py names them. Addresses too, but for folders of text."""
    tasks: tuple[str, ...] = ()
    """Tasks, groups, tags or patterns of lm_eval, with commas or spaces between them, such as hellaswag,arc_easy."""
    include_path: tuple[str, ...] = ()
    """Folders of task files (.yaml) of your own."""
    num_fewshot: int | None = None
    """Solved examples before a question of --tasks. None: as many as the task's file says."""
    limit: int = 0
    """Sequences of T tokens, or questions, to take of each; 0: all."""
    stride: int = 0
    """Tokens of text from the beginning of one sequence to the next; those before are context. 0: T, no overlap."""
    batch_size: int = flag(8, least=1)
    """Sequences of a batch per device of dp and stage of pp."""
    text_column: str = "text"
    """Column of a record that holds its text."""
    json: bool = False
    """Print one JSON object instead of tables."""
    output: str = ""
    """File for that object."""


def read_options(kind, program, of_word=lambda word: ""):
    """`Options` of the program that is run. Call it before jax is imported. of_word: of `config/foreign.py: hints`."""
    options = one_sentence(lambda: read_flags(kind, sys.argv[1:], program, of_word))
    platforms.set_xla_flags(options.n_devices)
    return options


def run_on_cpu(kind, program, main):
    """Run main(options of the dataclass `kind`) of a program that needs no accelerator: these may belong to a run."""
    platforms.choose_cpu()
    interrupts.run(lambda: main(read_flags(kind, sys.argv[1:], program)))


def open_model(options, text):
    """(Config, mesh, parameters, tokenizer) of `options.model` on the mesh of `options`, matrices in model_dtype. The
    tokenizer is None where the model has none; UserError where `text` needs one. Warns where --T is more than the model
    was made for, or refuses it."""
    import jax  # here: XLA's flags must be in the environment before

    import model
    from architectures import parameters
    from hf import hub
    from inference import weights
    from runtime.jax_setup import configure_jax
    from training.device_mesh import make_mesh
    from training.train_state import abstract_params

    platforms.find_devices()
    flags, load = weights.open_weights(options.model)
    folder = hub.folder_of(options.model)
    encoding = tokenization.folder_tokenizer(folder)
    if encoding is None and text:
        raise UserError(f"{folder}: has no tokenizer; put its tokenizer.json there.")
    warn_of_more_tokens(encoding, flags["vocab_size"], folder)
    most = weights.max_positions(options.model, flags["T"])
    if options.T > most:
        said = f"--T {options.T}: {options.model} was made for {most} tokens"
        warn_or_refuse(flags["architecture"], said)
    cfg = settle.validate(config_of(options, flags), jax.device_count())
    configure_jax(cfg)
    mesh = make_mesh(cfg)
    table = model.param_table(cfg)

    def convert(p, w):
        if not p.cast or w.dtype == cfg.model.model_dtype:
            return w
        converted = w.astype(cfg.model.model_dtype)
        w.delete()  # one leaf at a time is held in both types
        return converted

    stored = load(abstract_params(cfg, mesh))
    params = jax.tree.map(convert, table, stored, is_leaf=parameters.is_param)
    return cfg, mesh, params, encoding


@contextlib.contextmanager
def memory_explained(advice):
    """Raises UserError, which ends with `advice`, where the devices lack memory for what is done in here."""
    import jax

    try:
        yield
    except jax.errors.JaxRuntimeError as e:
        if not str(e).startswith("RESOURCE_EXHAUSTED"):
            raise
        raise UserError(f"the devices lack memory ({first_line(e)}); {advice}.") from None


def warn_of_more_tokens(encoding, vocab_size, folder):
    """Warn where the tokenizer in a folder, if there is one, has more tokens than the model."""
    if encoding and encoding.n_vocab > vocab_size:
        warn(
            f"{folder}: its tokenizer has {encoding.n_vocab} tokens, and the model {vocab_size}; text that has one of "
            f"those beyond is refused"
        )


def warn_or_refuse(name, said):
    """Warn that the positions of an architecture are exceeded. Raises UserError where it learns them."""
    if architecture(name).learns_positions:
        raise UserError(f"{said}; give fewer.")
    warn(said)


def config_of(options, flags):
    """The Config, not validated yet, for a model of these flags on the mesh of `options`."""
    batch = max(1, options.n_device_axis[1])  # any batch that fits the mesh does
    flags = flags | dict(
        n_device_axis=options.n_device_axis,
        n_devices=options.n_devices,
        compilation_cache=options.compilation_cache,
        pp_interleave=1,  # decoding goes round once
        attention="auto",  # perhaps on another platform than training
        experts="auto",
        microbatches=batch,
        train_batch_size=batch,
        val_batch_size=batch,
    )
    if options.model_dtype:
        flags["model_dtype"] = options.model_dtype
    return utils.replace(utils.Config(), **flags)


def stored_config(flags):
    """The Config of {flag: value} as config.json has it; flags that it lacks have their defaults."""
    flags = {name: flags[name] for name in flags.keys() & utils.FIELDS}
    flags["n_device_axis"] = tuple(flags["n_device_axis"])
    return utils.replace(utils.Config(), **flags)


def cell(value, error, form):
    """A number, and its standard error if there is one, as text."""
    text = f"{value:{form}}"
    return text if error is None else f"{text} ± {error:{form.lstrip('+')}}"


def markdown(rows):
    """A Markdown table of rows {heading: text}, its columns aligned, the first one of names."""
    lines = [list(rows[0]), *(list(row.values()) for row in rows)]
    first, *others = [max(map(len, column)) for column in zip(*lines)]
    lines.insert(1, ["-" * first, *(":".rjust(width, "-") for width in others)])
    table = []
    for name, *numbers in lines:
        cells = [name.ljust(first), *map(str.rjust, numbers, others)]
        table.append(f"| {' | '.join(cells)} |")
    return "\n".join(table)


def before_prompt(options, encoding):
    """Token ids that `options.start` puts before every prompt."""
    from hf import hub  # here: it imports jax

    if options.start == "nothing":
        return []
    if options.start == "auto" and isinstance(encoding, tokenization.HubTokenizer):
        config = read_json(hub.folder_of(options.model), "config.json")
        if "data_fingerprint" not in config:  # not trained here
            return encoding.before_text()
    return [encoding.eot_token]

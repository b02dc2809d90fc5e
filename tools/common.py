"""What the programs in tools/ share: flags, opening a model, tables."""

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
    """Flags of every program that opens a model. Those that have the name of a flag in utils.py mean the same."""

    model: str = argument()
    """A run directory, local or gs:// or s3://; a local folder in the Hugging Face format; or a model of its hub,
    hf://ORGANISATION/NAME or hf://ORGANISATION/NAME@REVISION. Of a run the newest sound checkpoint is used, or the best
    one where the run overfits; RUN@STEP names that of a step."""
    n_device_axis: Mesh = utils.Run.n_device_axis
    """Mesh shape: dp pp tp, as for main.py; it need not be the one that the model was trained on."""
    n_devices: int = utils.Run.n_devices
    """Devices to use, as for main.py; 0: all that are present."""
    T: int = 0
    """Tokens of a sequence: of a window of text, or of a prompt with its continuation. 0: the length that the model was
    trained with or, if it was imported, was made for. Rotary models accept more; GPT-2 has no positions beyond."""
    model_dtype: Literal["bfloat16", "float16", "float32"] | None = None
    """Type of activations and matrices; None: the one in which the model was trained."""
    start: Literal["auto", "end_of_text", "nothing"] = "auto"
    """What precedes a prompt, or a question of --tasks that has a context: the end-of-text token, or nothing. auto:
    what the model's tokenizer.json puts there; for a model trained here, the end-of-text token before prompts."""
    compilation_cache: str = utils.Run.compilation_cache
    """Folder of XLA's persistent compilation cache; empty: none."""


@dataclass(frozen=True, kw_only=True)
class Sample(Options, utils.Sample):
    """Continue prompts with a trained model."""

    prompt: tuple[str, ...] = ()
    """Texts to continue; without one, every line that is typed."""
    inference_batch: int = flag(1, least=1)
    """Samples to draw of each prompt."""
    max_tokens: int | None = flag(None, least=1)
    """Tokens to add to a prompt. None: 64, or as many as fit in the sequence."""
    stop: tuple[str, ...] = ()
    """Strings that end a sample, which stops before them. The end-of-text token always ends it, and so does each
    eos_token_id of a model in the Hugging Face format."""
    seed: int = utils.Run.seed
    """Seed of the draws."""


@dataclass(frozen=True, kw_only=True)
class Evaluate(Options):
    """Measure a trained model on shards, text and the tasks of lm_eval."""

    data: tuple[str, ...] = flag((), nonempty=True)
    """What to measure on. Each is a folder of shards, or a folder with such a folder val in it; or text or records,
    named as --source of data/tokenize_shards.py. Addresses in buckets too, except for folders of text."""
    tasks: tuple[str, ...] = ()
    """Tasks, groups, tags or patterns of lm_eval, with commas or spaces between them, such as hellaswag,arc_easy."""
    include_path: tuple[str, ...] = ()
    """Folders with task files (.yaml) of your own."""
    num_fewshot: int | None = None
    """Solved examples before a question of --tasks. None: the number in the task's file."""
    limit: int = 0
    """Maximum number of sequences of each --data, and of questions of each task; 0: all."""
    stride: int = 0
    """Tokens from the beginning of one sequence of a text to that of the next; the overlap is context, and is not
    scored again. 0: T, no overlap."""
    batch_size: int = flag(8, least=1)
    """Sequences of a batch per device of dp and stage of pp."""
    text_column: str = "text"
    """Column of a record that holds its text."""
    json: bool = False
    """Print one JSON object instead of tables."""
    output: str = ""
    """File to write that object to."""


def read_options(schema, program, of_word=lambda word: ""):
    """The options on the command line, of the dataclass `schema`. Call it before jax is imported, since it sets XLA's
    flags. of_word: as in `config/foreign.py: hints`."""
    options = one_sentence(lambda: read_flags(schema, sys.argv[1:], program, of_word))
    platforms.set_xla_flags(options.n_devices)
    return options


def run_on_cpu(schema, program, main):
    """Run main(options of the dataclass `schema`) without the accelerator, which may be in use by a training run."""
    platforms.choose_cpu()
    interrupts.run(lambda: main(read_flags(schema, sys.argv[1:], program)))


def open_model(options, text):
    """Open `options.model` on the mesh of `options`: (Config, mesh, parameters, tokenizer), matrices in model_dtype.

    The tokenizer is None where the model has none. text: whether one is needed. Warns where --T is more than the model
    was made for. Raises UserError where a tokenizer is needed and missing, or where the model cannot have that T.
    """
    import jax  # here, since XLA's flags must be in the environment first

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
        w.delete()  # so that at most one leaf is in memory in both types
        return converted

    stored = load(abstract_params(cfg, mesh))
    params = jax.tree.map(convert, table, stored, is_leaf=parameters.is_param)
    return cfg, mesh, params, encoding


@contextlib.contextmanager
def memory_explained(advice):
    """Raise a UserError that ends with `advice` where the devices run out of memory inside this context."""
    import jax

    try:
        yield
    except jax.errors.JaxRuntimeError as e:
        if not str(e).startswith("RESOURCE_EXHAUSTED"):
            raise
        raise UserError(f"the devices lack memory ({first_line(e)}); {advice}.") from None


def warn_of_more_tokens(encoding, vocab_size, folder):
    """Warn where the tokenizer of a model in `folder` has more tokens than the model. encoding: None: it has none."""
    if encoding and encoding.n_vocab > vocab_size:
        warn(
            f"{folder}: its tokenizer has {encoding.n_vocab} tokens, and the model {vocab_size}; text with a token "
            f"beyond those is refused"
        )


def warn_or_refuse(name, said):
    """Warn that a sequence exceeds the positions that a model was made for. Raises UserError where the architecture
    learns its positions and has no others."""
    if architecture(name).learns_positions:
        raise UserError(f"{said}; give fewer.")
    warn(said)


def config_of(options, flags):
    """The Config, not validated yet, of a model with these flags on the mesh of `options`."""
    # no training follows: any batch that fits the mesh will do
    batch = max(1, options.n_device_axis[1])
    flags = flags | dict(
        n_device_axis=options.n_device_axis,
        n_devices=options.n_devices,
        compilation_cache=options.compilation_cache,
        pp_interleave=1,  # in decoding, a token passes the stages once
        attention="auto",  # the platform may be another than in training
        experts="auto",
        microbatches=batch,
        train_batch_size=batch,
        val_batch_size=batch,
    )
    if options.model_dtype:
        flags["model_dtype"] = options.model_dtype
    return utils.replace(utils.Config(), **flags)


def stored_config(flags):
    """The Config of the {flag: value} in a config.json. Flags that it lacks have their defaults."""
    flags = {name: flags[name] for name in flags.keys() & utils.FIELDS}
    flags["n_device_axis"] = tuple(flags["n_device_axis"])
    return utils.replace(utils.Config(), **flags)


def cell(value, error, form):
    """A number as text, with its standard error unless that is None."""
    text = f"{value:{form}}"
    return text if error is None else f"{text} ± {error:{form.lstrip('+')}}"


def markdown(rows):
    """A Markdown table of rows {heading: text} with aligned columns, the first one to the left."""
    lines = [list(rows[0]), *(list(row.values()) for row in rows)]
    first, *others = [max(map(len, column)) for column in zip(*lines)]
    lines.insert(1, ["-" * first, *(":".rjust(width, "-") for width in others)])
    table = []
    for name, *numbers in lines:
        cells = [name.ljust(first), *map(str.rjust, numbers, others)]
        table.append(f"| {' | '.join(cells)} |")
    return "\n".join(table)


def before_prompt(options, encoding):
    """The token ids that `options.start` puts before every prompt."""
    from hf import hub  # here, since it imports jax

    if options.start == "nothing":
        return []
    if options.start == "auto" and isinstance(encoding, tokenization.HubTokenizer):
        config = read_json(hub.folder_of(options.model), "config.json")
        if "data_fingerprint" not in config:  # not trained here
            return encoding.before_text()
    return [encoding.eot_token]

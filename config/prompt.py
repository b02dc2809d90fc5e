"""The samples of a run: how many tokens fit after the prompt."""

from runtime.messages import UserError
from shards.tokenization import check_ids


def max_tokens(flags, found):
    """--max_tokens, cut so that the prompt and a sample fit in --T; a prompt that was not given is cut in
    `inference/sampling.py: prompt_ids`. Raises UserError where what was given does not fit."""
    cfg, given = flags
    encoding = found.encoding
    if encoding is None or cfg.model.T < 2:
        return {}
    T, tokens = cfg.model.T, cfg.sample.max_tokens
    prompt = whole_prompt(cfg, encoding)
    if "prompt" in given:
        check_ids(encoding, prompt, cfg.model.vocab_size, "--prompt: the text")
    length = len(prompt)
    if "max_tokens" not in given:
        tokens = max(1, min(tokens, T - length))
    length = length if "prompt" in given else 1
    if length + tokens > T:
        said = f"{length} tokens and {tokens} after them are more than --T {T}"
        if "max_tokens" in given:
            raise UserError(said, flag="max_tokens", value=tokens)
        raise UserError(said, flag="prompt")
    return dict(max_tokens=tokens)


def whole_prompt(cfg, encoding):
    """Token ids of --prompt as the beginning of a document."""
    return [encoding.eot_token, *encoding.encode_ordinary(cfg.sample.prompt)]

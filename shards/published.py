"""Published files of tiktoken ranks, found by their hash. Ranks alone do not say how a text is cut into pieces, nor
which tokens are special."""

# {sha256 of the file: the name of the encoding in tiktoken, which knows the rest}.
TIKTOKEN = {
    "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930": "r50k_base",  # GPT-2's too
    "94b5ca7dff4d00767bc256fdd1b27e5b17361d7b8a5f968547f9f23eb70d2069": "p50k_base",
    "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7": "cl100k_base",
    "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d": "o200k_base",
}
# The hash of qwen.tiktoken, of Qwen-7B to Qwen-72B, with the pattern and the special tokens of tokenization_qwen.py
# beside it. (That file also normalizes text to NFC first. This is left out here, so that no text is changed.)
QWEN = "b2b1b8dfb5cc5f024bafc373121c6aba3f66f9a5a0269e243470a1de16a33186"
QWEN_PATTERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
QWEN_PATTERN += r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
QWEN_SPECIAL += [f"<|extra_{i}|>" for i in range(205)]


def encoding_arguments(sha256, ranks):
    """The arguments of `tiktoken.Encoding` for the published file with this hash; None for an unknown file. ranks:
    {token bytes: rank}, the content of the file."""
    if sha256 == QWEN:
        special = {name: len(ranks) + i for i, name in enumerate(QWEN_SPECIAL)}
        return dict(
            name="qwen",
            pat_str=QWEN_PATTERN,
            mergeable_ranks=ranks,
            special_tokens=special,
        )
    if sha256 not in TIKTOKEN:
        return None
    # Imported here, since few programs need them.
    from unittest import mock

    from tiktoken_ext import openai_public

    # tiktoken's constructors would download the ranks, or search for them in a cache.
    with mock.patch.object(openai_public, "load_tiktoken_bpe", lambda *_, **__: ranks):
        return openai_public.ENCODING_CONSTRUCTORS[TIKTOKEN[sha256]]()

"""Small tokenizers of all families that models use, and difficult texts for them.

All of it is the same in every process: byte-pair merges are learnt from a seed's texts; the other
vocabularies are written down, since their trainers give each process a vocabulary of its own.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.trainers import BpeTrainer

QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

QWEN_TEMPLATE = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}{{- tool | tojson }}{{- '\\n' }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role in ['user', 'system', 'assistant'] and not message.tool_calls %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for call in message.tool_calls %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content }}
        {{- '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- raise_exception('unexpected role ' + message.role) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

WORDS = (
    "the of and landmark stone a way don't we've it's I'm they're context . , ! ? 3.14 ( ) def "
    "Straße naïve coöperate Ünïcödé Привет мир العربية שלום 日本語 漢字 ひらがな 한국어 안녕하세요 "
    "हिन्दी क्षत्रिय नमस्ते தமிழ் ภาษาไทย Việt ＦＵＬＬ"
).split()

PIECES = (
    *WORDS,
    *("👩‍👩‍👧‍👦", "🏳️‍🌈", "👍🏽", "🇰🇷", "❤️", "🧑🏿‍🚀", "😀", "𝔘𝔫𝔦", "𐍈"),
    *("한", "\u1112\u1161\u11ab", "क्ष", "ि", "्", "e\u0301", "a\u0308\u0323", "Z͑ͫ̓ͪ"),
    *(" ", "  ", "    ", "\n", "\r\n", "\t", "\u00a0", "\u200b", "\u200d", "\ufeff", "\u2028"),
    *("\u2581", "\u2581\u2581", "\ufffd", "\x00", "\x7f", "\u0085", "é", "ÿ", "<0xE2>", "##x"),
    *("'", " ' ", " n't", " 's", " .", " ,", "<", "|", ">", "\\", "𐀀", "\U0010ffff"),
)


def texts(count: int, seed: int, most: int = 12) -> list[str]:
    """Random texts of difficult pieces."""
    rng = random.Random(seed)
    return [
        "".join(rng.choice(PIECES) + rng.choice(("", "", " ")) for _ in range(rng.randint(0, most)))
        for _ in range(count)
    ]


def damaged(text: str, rng: random.Random) -> bytes:
    """The text's bytes, some of them removed, repeated or changed."""
    data = bytearray(text.encode())
    for _ in range(rng.randint(1, 4)):
        at = rng.randint(0, len(data))
        kind = rng.randrange(3)
        if kind == 0:
            del data[at : at + rng.randint(1, 2)]
        elif kind == 1:
            data[at:at] = bytes(
                rng.choice((0x80, 0xBF, 0xC0, 0xE2, 0xED, 0xF0, 0xF5, 0xFF)) for _ in range(2)
            )
        elif at < len(data):
            data[at] ^= 1 << rng.randrange(8)
    return bytes(data)


def corpus() -> list[str]:
    """Words in a seeded random order; plain ones are frequent, so that merges are learned."""
    rng = random.Random(1)
    return [" ".join(rng.choices(WORDS, k=12)) for _ in range(400)]


def qwen(folder: Path) -> Path:
    """Byte-level BPE with special tokens, plain added tokens and a chat template."""
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        corpus(), BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    )
    backend.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    plain = ["<think>", "</think>", "<tool_call>", "</tool_call>", "two words", "é!"]
    backend.add_tokens([AddedToken(name, normalized=False) for name in plain])
    return save(
        backend,
        folder,
        tokenizer_class="Qwen2Tokenizer",
        eos_token="<|im_end|>",
        chat_template=QWEN_TEMPLATE,
        clean_up_tokenization_spaces=True,
    )


def llama(folder: Path) -> Path:
    """Sentencepiece BPE with byte fallback; it adds a leading space, which decoding removes."""
    backend = sentencepiece(normalizers.Sequence([normalizers.Prepend("▁"), spaces()]))
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return save(backend, folder, tokenizer_class="LlamaTokenizer", eos_token="</s>")


def gemma(folder: Path) -> Path:
    """Sentencepiece BPE with byte fallback, without changes of spaces."""
    backend = sentencepiece(spaces())
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return save(backend, folder, tokenizer_class="GemmaTokenizer", eos_token="</s>")


def unigram(folder: Path, clean_up: bool = False) -> Path:
    """Sentencepiece unigram with the Metaspace decoder."""
    characters, beginnings = parts()
    pieces = ["▁", *characters, *beginnings, *("▁" + word for word in WORDS)]
    scores = [("<unk>", 0.0), ("</s>", 0.0)]
    scores += [(piece, -4.0 - 0.01 * i) for i, piece in enumerate(dict.fromkeys(pieces))]
    backend = Tokenizer(models.Unigram(scores, unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["<unk>", "</s>"])
    return save(backend, folder, clean_up_tokenization_spaces=clean_up, eos_token="</s>")


def wordpiece(folder: Path) -> Path:
    """WordPiece with its clean-up of spaces."""
    characters, beginnings = parts()
    inside = ["##" + part for part in [*characters, *beginnings]]
    pieces = ["[UNK]", *characters, *beginnings, *WORDS, *inside]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    backend = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(["[UNK]"])
    return save(backend, folder)


def suffixed(folder: Path) -> Path:
    """BPE that marks the ends of words: the last token of a text is decoded differently."""
    merges: dict[tuple[str, str], None] = {}
    for word in WORDS:
        signs = [*word[:-1], word[-1] + "</w>"]
        merges.update((("".join(signs[:i]), signs[i]), None) for i in range(1, len(signs)))
    characters, _ = parts()
    pieces = [*characters, *(c + "</w>" for c in characters), *map("".join, merges)]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    backend = Tokenizer(models.BPE(vocab, list(merges), end_of_word_suffix="</w>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.BPEDecoder()
    return save(backend, folder)


def parts() -> tuple[list[str], list[str]]:
    """The characters of the words, and prefixes of the words of two to four characters."""
    characters = sorted({character for word in WORDS for character in word})
    beginnings = {word[:length] for word in WORDS for length in (2, 3, 4) if len(word) > length}
    return characters, sorted(beginnings)


def spaces() -> normalizers.Normalizer:
    return normalizers.Replace(" ", "▁")


def sentencepiece(normalizer: normalizers.Normalizer) -> Tokenizer:
    """BPE with <unk>, <s>, </s> and 256 byte tokens first, in sentencepiece's layout."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizer
    trained.pre_tokenizer = pre_tokenizers.Split("▁", behavior="merged_with_next")
    trained.train_from_iterator(corpus(), BpeTrainer(vocab_size=500, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    # Half of the characters have no token, only bytes.
    learnt = [token for token in model["vocab"] if len(token) > 1 or ord(token) < 0x900]
    learnt = [token for token in learnt if all(ord(c) < 0x900 or c == "▁" for c in token)]
    learnt += [] if "▁" in learnt else ["▁"]
    vocab = {token: i for i, token in enumerate([*names, *learnt])}
    merges = [tuple(merge) for merge in model["merges"]]
    merges = [pair for pair in merges if {*pair, "".join(pair)} <= vocab.keys()]
    backend = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizer
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.add_tokens([AddedToken("<tool>", normalized=False)])
    return backend


def save(backend: Tokenizer, folder: Path, **config: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder

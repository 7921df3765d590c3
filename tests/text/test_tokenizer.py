"""Ids and bytes of every kind of vocabulary against the libraries that define them (T45, T19)."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time

import pytest
from tokenizers import Tokenizer as Reference

from octavo.text.tokenizer import load_tokenizer
from octavo.types import ConfigError, InvalidRequest
from tests.text import vocabularies
from tests.text.samples import PLAIN, TEXTS


def same_ids(tokenizer, reference, texts=TEXTS):
    different = {}
    for text in texts:
        got = tokenizer.encode(text, add_special_tokens=False)
        want = reference(text)
        if got != want:
            different[text] = (got, want)
    assert not different, f"{len(different)} of {len(texts)}: {list(different.items())[:3]}"


@pytest.fixture(scope="module")
def smollm(model_g):
    return load_tokenizer(model_g)


def test_there_are_two_hundred_texts():
    assert len(TEXTS) >= 200


def test_smollm2_gguf_equals_transformers(smollm, model_g):
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoTokenizer.from_pretrained(model_g.parent, gguf_file=model_g.name)
    # transformers does not know `pre` smollm, by which digits that are not 0-9 stand alone, too.
    texts = [text for text in TEXTS if "²" not in text and " ١" not in text]
    same_ids(smollm, lambda text: reference.encode(text, add_special_tokens=False), texts)


def test_smollm2_gguf_cuts_numbers_as_its_tokenizer_json_does(smollm, model_g):
    """That file's pre-tokenizer is Digits, then ByteLevel; the vocabulary is the GGUF's."""
    reference = Reference.from_str(smollm.vocabulary.backend.to_str())
    reference.pre_tokenizer = vocabularies.SMOLLM_CUT
    same_ids(smollm, lambda text: reference.encode(text).ids)


@pytest.mark.parametrize("pre", list(vocabularies.CUTS))
def test_byte_level_gguf_and_directory_equal_the_tokenizers_library(tmp_path, pre):
    reference = vocabularies.trained_byte_level(pre)
    directory = vocabularies.write_directory(reference, tmp_path / "directory")
    file = vocabularies.write_gguf(
        tmp_path / "vocabulary.gguf", vocabularies.byte_level_facts(reference, pre)
    )
    for tokenizer in (load_tokenizer(directory), load_tokenizer(file)):
        same_ids(tokenizer, lambda text: reference.encode(text).ids)
        assert tokenizer.vocab_size == reference.get_vocab_size()
        assert (tokenizer.bos_id, tokenizer.eos_ids) == (0, [1])
        assert tokenizer.special_ids == frozenset(range(len(vocabularies.SPECIALS)))
        assert not tokenizer.adds_bos


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_gguf_and_model_equal_sentencepiece(tmp_path, prefix):
    sentencepiece = pytest.importorskip("sentencepiece")
    model = vocabularies.train_sentencepiece(tmp_path / "model", add_dummy_prefix=prefix)
    reference = sentencepiece.SentencePieceProcessor(model_file=str(model))
    facts = vocabularies.sentencepiece_facts(model)
    facts["tokenizer.ggml.add_space_prefix"] = prefix
    file = vocabularies.write_gguf(tmp_path / "vocabulary.gguf", facts)
    for tokenizer in (load_tokenizer(model.parent), load_tokenizer(file)):
        same_ids(tokenizer, reference.encode, [text for text in PLAIN if "<unk>" not in text])
        assert tokenizer.adds_bos
        assert tokenizer.encode("hi") == [1, *reference.encode("hi")]
        for text in PLAIN:
            if "▁" not in text and text != "<unk>":  # a space to sentencepiece, and a token
                assert tokenizer.decode(tokenizer.encode(text)) == text


# What sentencepiece itself knows as special is plain text to its ``encode``.
NOT_CONTROL = [text for text in TEXTS if not any(t in text for t in ("<s>", "</s>", "<unk>"))]


@pytest.mark.parametrize("legacy", [None, True, False])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"add_dummy_prefix": False},
        {"remove_extra_whitespaces": True},
        {"normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": True},
        {"normalization_rule_name": "nmt_nfkc"},
    ],
)
def test_sentencepiece_model_equals_sentencepiece(tmp_path, options, legacy):
    """User-defined symbols too (<|im_start|>), glued to words: they are no beginning of a text."""
    sentencepiece = pytest.importorskip("sentencepiece")
    model = vocabularies.train_sentencepiece(tmp_path, **options)
    if legacy is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"legacy": legacy}))
    reference = sentencepiece.SentencePieceProcessor(model_file=str(model))
    texts = NOT_CONTROL
    if options.get("remove_extra_whitespaces"):
        # Ours strips each part between symbols, and a text of spaces keeps its prefix.
        texts = [text for text in texts if "|> <|" not in text and (text.strip() or not text)]
    if "normalization_rule_name" in options:
        # The tokenizers library applies such a rule by characters as people see them, sentencepiece
        # to code points: only it composes jamo and looks at every mark of a letter.
        texts = [text for text in texts if "jamo" not in text and not text.startswith("Z\u0351")]
    assert len(texts) > 150
    same_ids(load_tokenizer(tmp_path), reference.encode, texts)


def test_sentencepiece_symbols_of_spaces_are_found_in_a_text(tmp_path):
    """As in Gemma's model, which has no prefix space."""
    sentencepiece = pytest.importorskip("sentencepiece")
    symbols = ["<|im_start|>", "<|im_end|>", "▁▁", "▁▁▁", "▁▁▁▁▁", "\n\n"]
    model = vocabularies.train_sentencepiece(
        tmp_path, add_dummy_prefix=False, user_defined_symbols=symbols
    )
    reference = sentencepiece.SentencePieceProcessor(model_file=str(model))
    tokenizer = load_tokenizer(tmp_path)
    same_ids(tokenizer, reference.encode, NOT_CONTROL)
    for text in ("a     b  c", "   def f():\n\n       x"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_space_after_a_special_token_follows_the_configuration(tmp_path):
    """transformers' ``legacy``: every part between special tokens has a prefix space, or only the
    beginning of a text."""
    pytest.importorskip("sentencepiece")
    vocabularies.train_sentencepiece(tmp_path)

    def pieces(text, legacy):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"legacy": legacy}))
        tokenizer = load_tokenizer(tmp_path)
        ids = tokenizer.encode(text, add_special_tokens=False)
        return "|".join(tokenizer.vocabulary.backend.id_to_token(index) for index in ids)

    assert pieces("the</s>the", True) == "▁the|</s>|▁the"
    assert pieces("the</s>the", False) == "▁the|</s>|th|e"
    assert pieces("<s></s>the</s>", True) == "<s>|</s>|▁the|</s>"
    assert pieces("<s></s>the</s>", False) == "<s>|</s>|th|e|</s>"


@pytest.mark.parametrize("byte_fallback", [True, False])
def test_unigram_sentencepiece_model_equals_sentencepiece(tmp_path, byte_fallback):
    """Up to cuts of the same score, of which a long run has several."""
    sentencepiece = pytest.importorskip("sentencepiece")
    size = 640 if byte_fallback else 480
    model = vocabularies.train_sentencepiece(
        tmp_path, model_type="unigram", vocab_size=size, byte_fallback=byte_fallback
    )
    reference = sentencepiece.SentencePieceProcessor(model_file=str(model))
    tokenizer = load_tokenizer(tmp_path)

    def encode(text):
        """Sentencepiece's ids, or ours where they score the same."""
        theirs, ours = reference.encode(text), tokenizer.encode(text, add_special_tokens=False)
        scores = [sum(map(reference.get_score, ids)) for ids in (ours, theirs)]
        is_tie = len(set(text)) < 5 and reference.decode(ours) == reference.decode(theirs)
        return ours if is_tie and scores[0] == pytest.approx(scores[1], abs=1e-3) else theirs

    same_ids(tokenizer, encode, NOT_CONTROL)
    assert tokenizer.encode("<s>the", allow_special=False)[0] == 1  # BOS, and <s> spelled out
    assert tokenizer.encode("the<s>", allow_special=False).count(1) == 1


@pytest.mark.parametrize("kind", ["word", "char"])
def test_other_sentencepiece_models_are_refused(tmp_path, kind):
    pytest.importorskip("sentencepiece")
    vocabularies.train_sentencepiece(
        tmp_path, model_type=kind, vocab_size=150, byte_fallback=False, hard_vocab_limit=False
    )
    with pytest.raises(ConfigError, match=f"a sentencepiece {kind} model"):
        load_tokenizer(tmp_path)


def test_sentencepiece_space_after_a_special_token_follows_llama_cpp(tmp_path):
    """A text after a special token begins anew, with its own prefix space."""
    pytest.importorskip("sentencepiece")
    model = vocabularies.train_sentencepiece(tmp_path / "model")
    file = vocabularies.write_gguf(
        tmp_path / "vocabulary.gguf", vocabularies.sentencepiece_facts(model)
    )
    tokenizer = load_tokenizer(file)
    word = tokenizer.encode("the", add_special_tokens=False)
    assert tokenizer.encode("the</s>the", add_special_tokens=False) == [*word, 2, *word]


def test_sentencepiece_gguf_cuts_at_special_tokens_as_llama_cpp_does(tmp_path):
    """Each part between them is a text of its own, for sentencepiece to encode."""
    sentencepiece = pytest.importorskip("sentencepiece")
    model = vocabularies.train_sentencepiece(tmp_path / "model")
    facts = vocabularies.sentencepiece_facts(model)
    tokenizer = load_tokenizer(vocabularies.write_gguf(tmp_path / "vocabulary.gguf", facts))
    reference = sentencepiece.SentencePieceProcessor(model_file=str(model))
    special = {
        text: index
        for index, text in enumerate(facts["tokenizer.ggml.tokens"])
        if facts["tokenizer.ggml.token_type"][index] in (2, 3)
    }
    pattern = re.compile("(" + "|".join(map(re.escape, special)) + ")")

    def encode(text):
        parts = filter(None, pattern.split(text))
        return [i for p in parts for i in ([special[p]] if p in special else reference.encode(p))]

    same_ids(tokenizer, encode)


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"tokenizer.ggml.pre": "my-own"}, r"'my-own'.*supported: .*llama-bpe.*smollm"),
        ({"tokenizer.ggml.merges": None}, "merges is missing"),
        ({"tokenizer.ggml.model": "bert"}, "'bert'.*gpt2 and llama"),
        ({"tokenizer.ggml.model": None}, "None"),
        ({"tokenizer.ggml.tokens": None}, "no vocabulary"),
        ({"tokenizer.ggml.model": "llama"}, "scores: missing"),
        ({"tokenizer.ggml.eos_token_id": 70000}, "70000.* tokens"),
        ({"tokenizer.ggml.merges": ["zz qq"]}, "do not fit"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "token_type has 2"),
        (
            {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": None},
            "bos_token_id is missing",
        ),
    ],
)
def test_gguf_vocabularies_with_holes_are_refused_in_one_line(tmp_path, changes, reason):
    facts = vocabularies.byte_level_facts(vocabularies.trained_byte_level("gpt-2"), "gpt-2")
    file = vocabularies.write_gguf(tmp_path / "broken.gguf", {**facts, **changes})
    with pytest.raises(ConfigError, match=reason) as caught:
        load_tokenizer(file)
    assert "broken.gguf" in str(caught.value) and "\n" not in str(caught.value)


def test_duplicate_tokens_are_refused(tmp_path):
    facts = vocabularies.byte_level_facts(vocabularies.trained_byte_level("gpt-2"), "gpt-2")
    facts["tokenizer.ggml.tokens"][-1] = facts["tokenizer.ggml.tokens"][300]
    file = vocabularies.write_gguf(tmp_path / "twice.gguf", facts)
    with pytest.raises(ConfigError, match="two ids, 300 and"):
        load_tokenizer(file)


def test_missing_pre_and_types_use_the_defaults(tmp_path, caplog):
    reference = vocabularies.trained_byte_level("gpt-2")
    facts = vocabularies.byte_level_facts(reference, None)
    facts["tokenizer.ggml.token_type"] = None
    with caplog.at_level("WARNING"):
        tokenizer = load_tokenizer(vocabularies.write_gguf(tmp_path / "old.gguf", facts))
    assert "old.gguf: tokenizer.ggml.pre is missing" in caplog.text and "--tokenizer" in caplog.text
    same_ids(tokenizer, lambda text: reference.encode(text).ids, PLAIN)
    assert tokenizer.special_ids == {0, 1}


def test_add_bos_and_add_eos_of_the_file_are_followed(tmp_path):
    facts = vocabularies.byte_level_facts(vocabularies.trained_byte_level("gpt-2"), "gpt-2")
    facts |= {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    tokenizer = load_tokenizer(vocabularies.write_gguf(tmp_path / "both.gguf", facts))
    inner = tokenizer.encode("hi", add_special_tokens=False)
    assert tokenizer.encode("hi") == [0, *inner, 1]
    assert tokenizer.encode("") == [0, 1]


def test_completion_text_that_has_its_bos_gets_no_second_one(tmp_path):
    """T31, completions: BOS once, and none at all with add_special_tokens=False."""
    reference = vocabularies.trained_byte_level("gpt-2", bos=True)
    tokenizer = load_tokenizer(vocabularies.write_directory(reference, tmp_path))
    assert tokenizer.adds_bos
    assert tokenizer.encode("hi") == reference.encode("hi").ids
    assert tokenizer.encode("<s>hi") == tokenizer.encode("hi")
    assert tokenizer.encode("hi", add_special_tokens=False) == tokenizer.encode("hi")[1:]


def test_truncation_and_padding_of_tokenizer_json_are_not_applied(tmp_path):
    reference = vocabularies.trained_byte_level("gpt-2")
    reference.enable_truncation(4)
    reference.enable_padding(length=64)
    tokenizer = load_tokenizer(vocabularies.write_directory(reference, tmp_path))
    assert tokenizer.decode(tokenizer.encode("a text of many words")) == "a text of many words"


def test_bytes_join_to_the_text(smollm):
    """T19: the bytes of the tokens are the UTF-8 of the text, whatever the script."""
    for text in PLAIN:
        ids = smollm.encode(text, add_special_tokens=False)
        assert b"".join(map(smollm.token_bytes, ids)) == text.encode()
        assert smollm.decode(ids) == text
    special = smollm.encode("<|im_end|>")
    assert smollm.token_bytes(special[0]) == b"<|im_end|>"
    assert smollm.decode(special) == "" and smollm.decode(special, False) == "<|im_end|>"


def test_token_text_shows_characters_not_the_byte_alphabet(smollm):
    texts = [smollm.token_text(index) for index in range(smollm.vocab_size)]
    assert not any("Ġ" in text for text in texts)
    assert " the" in texts


def test_ids_beyond_the_vocabulary_have_no_bytes(smollm):
    """A model's embedding may have more rows than its tokenizer has tokens."""
    assert smollm.token_bytes(smollm.vocab_size + 5) == b""
    assert smollm.decode([19556, smollm.vocab_size]) == "Hello"


def test_control_tokens_can_be_read_as_plain_text(smollm):
    for text in ["a<|im_end|>b", "<|im_start|>", "no control"]:
        ids = smollm.encode(text, allow_special=False)
        assert not set(ids) & smollm.control_ids
        assert smollm.decode(ids) == text


def test_lone_surrogates_are_a_bad_request(smollm):
    with pytest.raises(InvalidRequest, match="surrogate"):
        smollm.encode("a\ud800b")


def test_override_names_another_tokenizer(tmp_path, model_g):
    reference = vocabularies.trained_byte_level("gpt-2")
    directory = vocabularies.write_directory(reference, tmp_path)
    for override in (directory, directory / "tokenizer.json"):
        assert load_tokenizer(model_g, str(override)).vocab_size == reference.get_vocab_size()
    with pytest.raises(ConfigError, match="nowhere"):
        load_tokenizer(model_g, "./nowhere")


@pytest.mark.parametrize("content", ["{", "[]", '{"model": {"type": "Strange"}}'])
def test_broken_tokenizer_json_is_refused(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_directory_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_other_spellings_are_refused(tmp_path):
    content = json.loads(vocabularies.trained_byte_level("gpt-2").to_str())
    content["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    content["pre_tokenizer"] = {"type": "Whitespace"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="WordPiece"):
        load_tokenizer(tmp_path)


def test_tokens_that_only_the_configuration_calls_special_are_special(tmp_path):
    reference = Reference.from_str(vocabularies.trained_byte_level("gpt-2").to_str())
    content = json.loads(reference.to_str())
    content["added_tokens"] = []
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    settings = {"eos_token": {"content": "</s>"}, "additional_special_tokens": ["<|im_end|>"]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.special_ids == {1, 3} and tokenizer.eos_ids == [1]
    assert 3 in tokenizer.encode("a<|im_end|>")


def test_loading_is_quick_and_imports_neither_torch_nor_transformers(model_g):
    """It is on the server's start-up path. CPU seconds, since machines are shared: 0.3, and with
    what must not be imported several."""
    code = (
        "import sys, time; from pathlib import Path;"
        "from octavo.text.tokenizer import load_tokenizer;"
        f"load_tokenizer(Path({str(model_g)!r}));"
        "assert not {'torch', 'transformers', 'gguf'} & set(sys.modules);"
        "print(time.process_time())"
    )
    started = time.perf_counter()
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert float(found.stdout) < 2, f"{time.perf_counter() - started:.2f} s in all"


@pytest.mark.parametrize(
    "settings", [{"chat_template": [{"nam": 1}]}, {"added_tokens_decoder": {"1": 5}}]
)
def test_settings_of_another_shape_are_the_users_to_mend(tmp_path, model_r, settings):
    shutil.copy(model_r / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match="tokenizer files are not as transformers writes them"):
        load_tokenizer(tmp_path)

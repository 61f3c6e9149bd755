"""Train the tokenizer: ``python -m tools.train.tokenizer --corpus stories.jsonl.xz --out DIR``.

Byte-level BPE, so that any UTF-8 text round-trips exactly although the corpus is plain ASCII.
The chat template is part of the tokenizer's configuration.
"""

import argparse
import json
import logging
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from tools.train.data import Story, canonical_request, read_corpus, split

log = logging.getLogger("tokenizer")

VOCABULARY = 4096
MAX_LENGTH = 2048
BOS, EOS, PAD, USER, STORY = SPECIAL = ("<|bos|>", "<|eos|>", "<|pad|>", "<|user|>", "<|story|>")

# A system message is left out: the models never saw one, and their only task needs none.
CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
    {%- if message['role'] == 'user' -%}
        {{- '<|user|>' + (message['content'] | trim) -}}
    {%- elif message['role'] == 'assistant' -%}
        {{- '<|story|>' + (message['content'] | trim) + eos_token -}}
    {%- elif message['role'] != 'system' -%}
        {{- raise_exception('unknown role: ' + message['role']) -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|story|>' -}}
{%- endif -%}
"""


def train(stories: list[Story]) -> Tokenizer:
    """Train on the stories and the canonical requests."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (text for story in stories for text in (canonical_request(story.prompt), story.text))
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A $B",
        special_tokens=[(BOS, tokenizer.token_to_id(BOS))],
    )
    return tokenizer


def save(tokenizer: Tokenizer, out: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, the chat template inside the latter."""
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=[USER, STORY],
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_LENGTH,
        padding_side="left",
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(out, save_jinja_files=False)
    _use_public_names(out / "tokenizer_config.json")


def _use_public_names(path: Path) -> None:
    """Rename what transformers 5 writes in its own terms, so that version 4 loads it too."""
    config = json.loads(path.read_text(encoding="utf-8"))
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    config["additional_special_tokens"] = config.pop("extra_special_tokens")
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", type=Path, required=True, help="JSON lines, plain or .xz")
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    stories, _ = split(read_corpus(arguments.corpus))
    save(train(stories), arguments.out)
    log.info("%d tokens, from %d stories, in %s", VOCABULARY, len(stories), arguments.out)


if __name__ == "__main__":
    main()

"""Conversations in tokens: what frames their messages, and that each continues those before it."""

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from evalkit.retention.chat import Chat

SAID = [("What is up? ", "Not much."), ("Tell me more", " I could."), ("Bye", "Bye.")]
TURNED = (
    "<s>{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
BRACKETS = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% elif m.role == 'assistant' %}"
    " {{ m.content }}</s>{% else %}{{ raise_exception('no such role') }}{% endif %}{% endfor %}"
)
DEFAULTED = "{% if messages[0].role != 'system' %}<system>Be kind.</s>{% endif %}" + TURNED.removeprefix("<s>")
FORGETFUL = (
    "{% for m in messages %}<{{ m.role }}>{% if loop.last or m.role == 'user' %}{{ m.content }}{% else %}...{% endif %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TEMPLATES = {"turned": TURNED, "brackets": BRACKETS, "defaulted": DEFAULTED}


def tokenizer(template=None, begins=False):
    """Bytes, with <s> and </s>; `begins` puts <s> before every text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(BPE({"<s>": 0, "</s>": 1, **{letter: i + 2 for i, letter in enumerate(alphabet)}}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    if begins:
        from tokenizers.processors import TemplateProcessing

        core.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    made = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")
    made.chat_template = template
    return made


def told(chat):
    """The conversation's tokens, message after message."""
    tokens = ()
    for number, (user, reply) in enumerate(SAID):
        tokens += chat.user(user, first=not number) + chat.reply(reply)
    return tokens


def rendered(made, count=6, prompt=False):
    parts = [(role, text.strip()) for pair in SAID for role, text in zip(("user", "assistant"), pair, strict=True)]
    messages = [{"role": role, "content": text} for role, text in parts[:count]]
    return tuple(made.apply_chat_template(messages, add_generation_prompt=prompt, tokenize=True, return_dict=False))


@pytest.mark.parametrize("name", TEMPLATES)
def test_messages_one_after_another_are_what_the_template_makes_of_the_whole(name):
    made = tokenizer(TEMPLATES[name])
    chat = Chat.of(made)
    assert not chat.frame.plain
    assert rendered(made)[: len(told(chat))] == told(chat)
    assert chat.user(SAID[0][0], first=True) == rendered(made, 1, prompt=True)


def test_a_reply_ends_as_the_template_ends_it():
    chat = Chat.of(tokenizer(BRACKETS))
    assert chat.closing == (1,)
    assert chat.reply("Yes")[-1] == 1
    assert chat.closed([5, 1]) and not chat.closed([5, 6])
    assert chat.text(chat.reply("Yes")).strip() == "Yes"


def test_a_system_prompt_stands_first():
    made = tokenizer(DEFAULTED)
    assert made.decode(Chat.of(made, "Be short.").user("Hi", first=True)).startswith("<system>Be short.</s><user>Hi")
    assert made.decode(Chat.of(made).user("Hi", first=True)).startswith("<system>Be kind.</s><user>Hi")


def test_where_a_template_takes_no_system_prompt_the_first_message_has_it():
    made = tokenizer(BRACKETS)
    assert made.decode(Chat.of(made, "Be short.").user("Hi", first=True)) == "<s>[INST] Be short.\n\nHi [/INST]"
    assert "Be short." not in made.decode(Chat.of(made, "Be short.").user("Hi", first=False))


def test_a_template_that_tells_the_date_tells_the_same_every_day():
    dated = "{{ strftime_now('%d %b %Y') }}" + TURNED
    assert Chat.of(tokenizer(dated)).frame.opening.startswith("26 Jul 2024")


@pytest.mark.parametrize("template", [None, FORGETFUL])
def test_without_a_template_that_stays_the_frame_is_plain(template):
    made = tokenizer(template)
    chat = Chat.of(made, "Be short.")
    assert chat.frame.plain
    assert made.decode(told(chat)).startswith(
        "Be short.\n\nUser: What is up?\nAssistant: Not much.\nUser: Tell me more\nAssistant:"
    )


def test_a_plain_reply_ends_with_its_line():
    chat = Chat.of(tokenizer())
    assert chat.closed(chat.reply("Yes")) and not chat.closed(chat.answer("Yes"))


@pytest.mark.parametrize("begins", [True, False])
def test_a_plain_conversation_begins_as_the_tokenizer_begins_texts(begins):
    chat = Chat.of(tokenizer(begins=begins))
    assert (chat.user("Hi", first=True)[0] == 0) == begins
    assert 0 not in chat.user("Hi", first=False) + chat.reply("Yes")


@pytest.mark.parametrize(("template", "begins"), [(TURNED, False), (None, True), (None, False)])
@pytest.mark.parametrize("first", [True, False])
def test_the_tokens_of_a_part_of_a_message_are_found(template, begins, first):
    made = tokenizer(template, begins)
    chat, text = Chat.of(made), "User: my cat is Tom Tom."
    found = chat.where(text, "Tom Tom", first=first)
    assert made.decode([chat.user(text, first=first)[place] for place in found]) == "Tom Tom"

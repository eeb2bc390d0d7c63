"""Chat templates of downloaded models: any error is an InputError, and time and memory are bounded."""

import os
import signal
import sys

import pytest

from smelt.core.errors import InputError
from smelt.models import chat_rendering
from smelt.models.chat_rendering import ChatRequest
from smelt.models.prompt_template import PromptTemplate
from tests.support.expected_errors import raises_code

TURN = [{"role": "user", "content": "a"}]
ERRORS = {
    "division": "{{ 1 // 0 }}", "missing key": "{{ {}['a'].b }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "nested parentheses": "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "nested blocks": "{% if 1 %}" * 300 + "{% endif %}" * 300,
    "assertion": "{{ caller() }}{% call(x) messages() %}{% endcall %}", "long integer": "{{ 10 ** 9999 }}",
    "key error of a format": "{{ '{a}'.format() }}", "index error of a format": "{{ '{}{}'.format(1) }}",
    "range": "{% for i in range(10 ** 9) %}{% endfor %}", "raised": "{{ raise_exception('no') }}",
    "not a string": "{{ messages[0].content.encode('utf-16').decode('ascii') }}",
    "own option": "{{ tojson }}{{ {1: 2, 'a': 3} | tojson(sort_keys=true) }}",
}  # fmt: skip
LIMITED = {
    "power": "{{ messages[0].content | length + 9 ** (9 ** 8) }}",
    "power of constants, when compiled": "{{ 9 ** (9 ** 8) }}",
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "multiplied text": "{{ messages[0].content * 3000000000 }}",
    "multiplied list": "{% set x = [messages] * 900000000 %}",
    "long text": "{% for i in range(99999) %}{{ messages[0].content * 9999 }}{% endfor %}",
}


@pytest.mark.parametrize("name", ERRORS)
def test_template_errors_are_input_errors(name):
    with raises_code("chat-template-failed", InputError):
        PromptTemplate("chat", ERRORS[name]).render("a")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such limits")
@pytest.mark.parametrize("name", LIMITED)
def test_template_time_and_memory_are_limited(name, monkeypatch):
    monkeypatch.setattr(chat_rendering, "BASE_SECONDS", 0.2)
    with raises_code("chat-template-failed", InputError):
        PromptTemplate("chat", LIMITED[name]).render("a")
    assert PromptTemplate("chat", "{{ messages[0].content }}").render("still works") == "still works"


def test_dataset_is_rendered_in_order_by_one_process(monkeypatch):
    monkeypatch.setattr(chat_rendering, "_REQUEST_CHARS", 50)
    template = PromptTemplate("chat", "{{ messages[0].content }}{{ messages | length }}")
    texts = [f"number {index}" * (index % 7) or "\ud800 ü" for index in range(1200)]
    first = template.render(texts[0])
    process = chat_rendering._worker._process
    assert template.render_prompts(texts) == [text + "1" for text in texts]
    assert first == texts[0] + "1"
    assert chat_rendering._worker._process is process


def test_template_error_names_failing_conversation():
    template = "{% if messages[-1].content == '700' %}{{ messages.x.y }}{% endif %}"
    requests = [ChatRequest([{"role": "user", "content": str(index)}], True) for index in range(800)]
    with pytest.raises(chat_rendering.ChatTemplateError, check=lambda error: error.request == 700):
        chat_rendering.render_chats(template, {}, requests)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_process_has_its_own_worker():
    template = PromptTemplate("chat", "{{ messages[0].content }}")
    assert template.render("parent") == "parent"
    pid = os.fork()
    if not pid:
        os._exit(0 if template.render("child") == "child" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert template.render("parent again") == "parent again"


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals")
def test_killed_worker_is_replaced():
    template = PromptTemplate("chat", "{{ messages[0].content }}")
    template.render("a")
    process = chat_rendering._worker._process
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert template.render("b") == "b"
    os.kill(chat_rendering._worker._process.pid, signal.SIGKILL)  # it may not have ended yet
    assert template.render("c") == "c"

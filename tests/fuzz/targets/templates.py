"""Chat templates: programs that come with a model. Each is refused in words or ends soon, and its
text stays within the bound."""

import jinja2

from pd_router.templates import MOST_CHARS, ChatTemplate, TemplateFailed

PACKAGES = ("pd_router",)
WORDS = (
    b"{% for m in messages %}", b"{% endfor %}", b"{{ m.content }}",
    b"{% if tools %}", b"{% endif %}",
    b"{% set n = namespace(t='x') %}", b"{% set n.t = n.t ~ n.t %}", b"{% macro f(a) %}",
    b"{% endmacro %}", b"{{ f(f) }}", b"range(99999)", b" | tojson(indent=2)", b" | join(',')",
    b" | replace('', 'xx')", b" | map(attribute='role')", b" | sort", b" | list", b" * 99999",
    b" ** 99", b"'%99999d' % 1", b"'{:>9}'.format(1)", b".center(99)", b"raise_exception('x')",
    b"loop.index", b"{% continue %}", b"{% generation %}", b"{% endgeneration %}", b"[::-1]",
    b"messages", b".__class__", b"strftime_now('%d')", b"{%- ", b" -%}", b"'\\n'",
)  # fmt: skip
_GIVEN = {
    "messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "a\nb"}],
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "documents": None,
    "add_generation_prompt": True,
    "bos_token": "<s>",
}


def one(data: bytes) -> None:
    try:
        template = ChatTemplate(data.decode("utf-8", "replace"))
    except jinja2.TemplateError:
        return  # what a router says of a model that it can't serve
    try:
        text = template.render(**_GIVEN)
    except TemplateFailed as failed:
        assert str(failed)
    else:
        assert len(text) <= MOST_CHARS


def seeds() -> list[bytes]:
    return [
        b"{% for m in messages %}{{ m['role'] ~ ': ' ~ m['content'] | trim }}{% endfor %}",
        b"{% set n = namespace(t='') %}{% for i in range(3) %}"
        b"{% set n.t = n.t + 'x' %}{% endfor %}",
        b"{%- macro f(a) -%}{{ a * 3 }}{%- endmacro -%}{{ f('x') | indent(2) | tojson }}",
        b"{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}{{ '%05.1f' % 1.5 }}",
        b"{{ messages | map(attribute='content') | join(', ') | replace('l', 'xx') }}",
    ]

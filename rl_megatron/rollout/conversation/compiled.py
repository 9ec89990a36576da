"""Chat templates in jinja's sandbox, as transformers compiles them, but with a faster lookup of attributes.

A history is rendered again for each turn, and a template looks up some ten attributes of each of its messages.
"""

from __future__ import annotations

from typing import Any

from jinja2 import Template
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from transformers.utils.chat_template_utils import _compile_jinja_template
from typing_extensions import override

_OF_DICTS = frozenset(dir(dict))
_OF_JINJA = frozenset({LoopContext, Namespace})
_PLAIN = frozenset({bool, int, str})  # of what is no method of a text, which the base looks at


def compiled(source: str) -> Template:
    """The template with transformers' filters, functions and tags. Raises TemplateSyntaxError."""
    known = _compile_jinja_template(source).environment
    sandbox = _Sandbox(
        trim_blocks=known.trim_blocks,
        lstrip_blocks=known.lstrip_blocks,
        extensions=[type(extension) for extension in known.extensions.values()],
    )
    sandbox.filters, sandbox.globals = known.filters, known.globals
    return sandbox.from_string(source)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Gives and refuses what its base does, which asks at each lookup whether the attribute of a type is safe."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._safe: dict[tuple[type, str], bool] = {}

    @override
    def getattr(self, obj: Any, attribute: str) -> Any:
        kind = type(obj)
        if kind is dict and attribute not in _OF_DICTS:  # the base tries an attribute of that name, which no dict has
            try:
                return obj[attribute]
            except KeyError:
                return self.undefined(obj=obj, name=attribute)
        if kind in _OF_JINJA:
            value = getattr(obj, attribute, None)
            if type(value) in _PLAIN and self.is_safe_attribute(obj, attribute, value):
                return value
        return super().getattr(obj, attribute)

    @override
    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        asked = type(obj), attr  # on which alone it depends
        if (safe := self._safe.get(asked)) is None:
            safe = self._safe[asked] = super().is_safe_attribute(obj, attr, value)
        return safe

"""Renders chat templates, in a process of its own that may be killed: a line of JSON in, a line out. Knows nothing of the rest.

A template comes from whoever made the model, and no sandbox keeps it from looping for ever or from asking for all memory.
Settings and functions are those of transformers 5.23 (`utils/chat_template_utils.py`), so that the text is the same.
"""

import datetime
import functools
import json
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

if __name__ == "__main__":
    sys.path[:] = json.loads(sys.argv[1])  # of the process that began this one

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

MOST_BYTES = 1 << 30  # of memory
LONGEST_TEXT = 32 << 20  # characters
MOST_KNOWN = 100_000  # beginnings
LEAST_VERSION = (3, 1, 6)  # of jinja2: before, there were ways out of the sandbox


known: dict[int, tuple[int, int]] = {}  # lengths and hashes of the texts of beginnings, by hashes of their messages


class Generation(Extension):
    """`{% generation %}`, which tells trainers what the assistant said, and changes no text."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own form)

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def raise_exception(message: object) -> None:
    raise jinja2.TemplateError(str(message))


def tojson(
    value: object, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


@functools.lru_cache(maxsize=8)
def compiled(source: str) -> Any:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    return environment.from_string(source)


def ends_of(render: Callable[..., str], request: dict[str, Any], whole: str, more: dict[str, Any]) -> list[int]:
    """Where in the first conversation's text its beginnings end, of so many messages each; -1 for what does not begin it.

    A talk of n turns has n beginnings, all of them the next turn's too: the length of each and its hash are kept.
    """
    if len(known) > MOST_KNOWN:
        known.clear()
    messages, ends = request["conversations"][0], []
    hashes = [hash((request["source"], json.dumps(request["variables"])))]
    for message in messages:
        hashes.append(hash((hashes[-1], message["role"], message["content"])))
    for n in request["beginnings"]:
        end, hashed = known.get(hashes[n], (0, None))
        if hash(whole[:end]) != hashed:  # a new one, or one of another day
            beginning = render(messages=messages[:n], **more)
            end, hashed = known[hashes[n]] = len(beginning), hash(beginning)
        ends.append(end if hash(whole[:end]) == hashed else -1)
    return ends


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """The text of each conversation and where beginnings of the first one end, or what is wrong with the template."""
    try:
        version = tuple(int(part) for part in jinja2.__version__.split(".")[:3])
        if version < LEAST_VERSION:
            return {"error": f"jinja2 {jinja2.__version__} has a leaky sandbox; pip install 'jinja2>=3.1.6'"}
        render: Callable[..., str] = compiled(request["source"]).render
        more = request["variables"] | {"tools": None, "documents": None, "add_generation_prompt": True}
        texts = [render(messages=messages, **more) for messages in request["conversations"]]
        ends = ends_of(render, request, texts[0], more) if request["beginnings"] else []
    except jinja2.TemplateSyntaxError as error:
        return {"error": f"line {error.lineno} of the template: {error.message}"}
    except jinja2.exceptions.SecurityError as error:
        return {"error": f"the template asks for what a sandbox forbids: {error}"}
    except jinja2.TemplateError as error:
        return {"error": f"the template says: {error}"}
    except MemoryError:
        return {"error": "the template needs more than 1 GiB of memory"}
    except Exception as error:  # whatever Python raises inside a template
        return {"error": f"the template fails: {type(error).__name__}: {error}"}
    if sum(map(len, texts)) > LONGEST_TEXT:
        return {"error": f"the template makes a text of more than {LONGEST_TEXT} characters"}
    return {"texts": texts, "ends": ends}


def main() -> None:
    with suppress(ImportError, ValueError, OSError):  # Windows has none; a lower limit stays
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    for line in sys.stdin.buffer:
        sys.stdout.write(json.dumps(answer(json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()

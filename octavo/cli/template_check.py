"""``octavo template-check``: what a model's chat template makes of a fixed set of conversations."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass

from octavo.checkpoint.locate import locate
from octavo.cli.arguments import Arguments, Command
from octavo.cli.console import PhaseLine, table
from octavo.flags import flag
from octavo.text.chat import load_chat_template
from octavo.text.template_check import Finding, check_template
from octavo.text.tokenizer import load_tokenizer


@dataclass(frozen=True)
class TemplateCheckOptions:
    model: str = flag(
        "smollm2-135m",
        "a local directory, a GGUF file, a hub id or a name from `octavo models`",
        group="template-check",
        positional=True,
    )
    chat_template: str | None = flag(
        None,
        "check this one instead: a file or the text itself",
        group="template-check",
        top=True,
    )
    tokenizer: str | None = flag(
        None, "tokenizer directory or file (default: the model's)", group="template-check"
    )
    revision: str | None = flag(
        None, "hub revision (branch, tag or commit)", group="template-check"
    )
    show: bool = flag(
        False, "print what each conversation becomes", group="template-check", top=True
    )
    json: bool = flag(False, "print JSON", group="template-check")


COMMAND = Command(
    "template-check",
    "Renders a fixed set of conversations and says which fail, and why. Exit code 1 when one fails "
    "that no chat can do without.",
    (TemplateCheckOptions,),
    examples=("octavo template-check MODEL", "octavo template-check MODEL --chat-template t.jinja"),
)


def run(arguments: Arguments) -> int:
    options = arguments.build(TemplateCheckOptions)
    progress = PhaseLine()
    files = locate(options.model, options.revision, weights=False, progress=progress)
    progress.end()
    tokenizer = load_tokenizer(files.path, options.tokenizer)
    template = load_chat_template(tokenizer, options.chat_template)
    if template is None:
        print(
            f"octavo: {options.model} has no chat template: chat is refused, completions work; "
            "give one with --chat-template FILE",
            file=sys.stderr,
        )
        return 1
    findings = check_template(template, tokenizer)
    if options.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2, ensure_ascii=False))
    else:
        _print(findings, options.show)
    return int(any(finding.problem and finding.basic for finding in findings))


def _print(findings: list[Finding], show: bool) -> None:
    rows = [(_mark(finding), finding.name, finding.problem) for finding in findings]
    print(table(rows))
    if show:
        for finding in findings:
            if finding.text is not None:
                print(f"\n--- {finding.name}\n{finding.text}")
    failed = [finding for finding in findings if finding.problem]
    basic = sum(finding.basic for finding in failed)
    print(f"\n{len(findings) - len(failed)} of {len(findings)} pass", end="")
    print(f"; {basic} of those that fail are basic" if failed else "")


def _mark(finding: Finding) -> str:
    if not finding.problem:
        return "ok"
    return "FAIL" if finding.basic else "no"

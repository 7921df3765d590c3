"""``octavo doctor``: what is wrong with this machine, or with a running server."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from dataclasses import dataclass

from octavo.cli.arguments import Arguments, Command
from octavo.cli.connection import Connection
from octavo.cli.console import table
from octavo.cli.diagnosis import Finding, Scrape, Stretch, diagnose
from octavo.config import environment_api_keys
from octavo.flags import flag

NUM_LOOKS = 6


@dataclass(frozen=True)
class DoctorOptions:
    url: str | None = flag(
        None,
        "a running server, http://host:port or unix:PATH; none: this machine",
        group="doctor",
        positional=True,
    )
    seconds: float = flag(10.0, "to look at the server", group="doctor", minimum=0.1, maximum=3600)
    api_key: str | None = flag(
        None, "a key that may read /metrics (also OCTAVO_API_KEY)", group="doctor"
    )
    json: bool = flag(False, "print JSON", group="doctor")


COMMAND = Command(
    "doctor",
    "Says what is wrong with this machine, or with a running server, and what to do about it.",
    (DoctorOptions,),
    examples=(
        "octavo doctor                         this machine",
        "octavo doctor http://127.0.0.1:8000   a server under load, for ten seconds",
    ),
)


def run(arguments: Arguments) -> int:
    """1 where something is wrong, else 0."""
    options = arguments.build(DoctorOptions)
    return examine(options) if options.url else look_around(options)


def look_around(options: DoctorOptions) -> int:
    from octavo.cli.host import facts

    found = facts()
    if options.json:
        print(json.dumps([dataclasses.asdict(fact) for fact in found], indent=2))
    else:
        print(table([(fact.name, fact.value) for fact in found], indent=""))
        troubles = [fact for fact in found if fact.trouble]
        for fact in troubles:
            print(f"\n{fact.name}: {fact.trouble}")
        if not troubles:
            print("\nnothing is in the way")
    return int(any(fact.trouble for fact in found))


def examine(options: DoctorOptions) -> int:
    """ConfigError where nobody answers; OctavoError for a key that may not read /metrics."""
    assert options.url is not None
    key = options.api_key or next(iter(environment_api_keys()), "").partition("=")[0] or None
    server = Connection(options.url, key, timeout=30.0)
    findings = health(server)
    looks = [Scrape(server.text("/metrics"), time.monotonic())]
    if not options.json:
        print(f"looking at {options.url} for {options.seconds:g} s", file=sys.stderr)
    for _ in range(NUM_LOOKS - 1):
        time.sleep(options.seconds / (NUM_LOOKS - 1))
        looks.append(Scrape(server.text("/metrics"), time.monotonic()))
    findings += diagnose(Stretch(looks))
    if options.json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        print("\n\n".join(map(shown, findings)) or "nothing is wrong")
    return int(bool(findings))


def health(server: Connection) -> list[Finding]:
    status, text = server.answer("/health")
    if status == 200:
        return []
    try:
        told = json.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        told = text[:200]
    return [
        Finding(
            "not healthy",
            "the server takes no requests",
            f"/health: {status}, {told}",
            "loading and draining pass by themselves; else the log has the reason",
        )
    ]


def shown(finding: Finding) -> str:
    lines = [f"{finding.name}: {finding.says}", f"  seen   {finding.evidence}"]
    lines.append(f"  fix    {finding.fix}")
    if finding.checklist:
        lines.append(f"  guide  {finding.checklist}")
    return "\n".join(lines)

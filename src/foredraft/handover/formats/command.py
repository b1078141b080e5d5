"""A shell script that starts the engine."""

from shlex import quote

from foredraft.handover.deployment import Handover
from foredraft.handover.output_format import API_KEY_VARIABLE, OutputFormat
from foredraft.handover.text import CONFIG_NAME, describe, list_arguments, to_yaml

KEY = f'"${API_KEY_VARIABLE}"'  # quoted already: the shell puts the key in


def write(handover: Handover) -> str:
    """Return the script: conversions, the configuration file if there is one, and the command."""
    engine = handover.engine
    text = describe(handover)
    text += "".join(f"{command}\n" for command in handover.drafter.preparations)
    if handover.config:
        text += f"cat > {CONFIG_NAME} <<'EOF'\n{to_yaml(handover.config)}EOF\n"
    for name, value in handover.drafter.environment.items():
        text += f"export {name}={quote(value)}\n"
    arguments = list_arguments(handover, handover.deployment.host, KEY, CONFIG_NAME)
    return text + _join_lines([*engine.program], arguments) + "\n"


def _join_lines(program: list[str], arguments: list[str]) -> str:
    """Return a command with one flag and its values per line."""
    words = [argument if argument == KEY else quote(argument) for argument in arguments]
    lines = [" ".join(program)]
    for word in words:
        if word.startswith("--"):
            lines.append(word)
        else:
            lines[-1] += f" {word}"
    return " \\\n  ".join(lines)


FORMAT = OutputFormat("command", "start.sh", write)

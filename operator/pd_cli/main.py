"""The `pdcluster` command: one module a subcommand, loaded only when it is called."""

import importlib

import click

_COMMANDS = {
    "serve": ("pd_cli.serve", "Serve a model on this machine with one worker, in the foreground."),
    "up": ("pd_cli.up", "Run a PDCluster on this machine, in the foreground."),
    "status": ("pd_cli.show", "Show the PDClusters that run on this machine."),
    "top": ("pd_cli.top", "Watch a PDCluster live in a terminal."),
    "requests": ("pd_cli.requests", "Show what happened to requests, step by step."),
    "validate": ("pd_cli.validate", "Check a PDCluster file."),
    "estimate": ("pd_cli.estimate", "Estimate the size and the hand-over of a prompt's KV."),
    "explain": ("pd_cli.explain", "Say why a PDCluster's pools have the sizes that they have."),
    "advise": ("pd_cli.advise", "Say whether to take prefill and decode apart, and why."),
    "simulate": ("pd_cli.simulate", "Simulate a trace of requests on a cluster."),
    "profile": ("pd_cli.profile", "Measure a running PDCluster's workers for simulations."),
    "down": ("pd_cli.down", "End a PDCluster that runs on this machine."),
    "logs": ("pd_cli.logs", "Print what a pod has said."),
    "completion": ("pd_cli.completion", "Print what a shell needs to complete these words."),
    "quickstart": ("pd_cli.quickstart", "Bring a PDCluster up and stream one answer."),
}


class _Lazy(click.Group):
    """`pdcluster --help` answers at once: it loads no command."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        del ctx
        if cmd_name not in _COMMANDS:
            return None
        command = importlib.import_module(_COMMANDS[cmd_name][0]).command
        return command if isinstance(command, click.Command) else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])


@click.command(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="pdcluster")
def main() -> None:
    """Disaggregated LLM serving from one PDCluster file."""


if __name__ == "__main__":
    main()

"""`pdcluster completion`: what a shell needs to complete the command's words."""

import click
from click.shell_completion import get_completion_class


@click.command(name="completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def command(ctx: click.Context, shell: str) -> None:
    """Print a script that makes SHELL complete commands, options and their values.

    \b
    bash: echo 'eval "$(pdcluster completion bash)"' >> ~/.bashrc
    zsh:  echo 'eval "$(pdcluster completion zsh)"' >> ~/.zshrc
    fish: pdcluster completion fish > ~/.config/fish/completions/pdcluster.fish
    """
    made = get_completion_class(shell)
    if made is None:
        raise click.UsageError(f"nothing is known of {shell}")
    root = ctx.find_root().command
    click.echo(made(root, {}, "pdcluster", "_PDCLUSTER_COMPLETE").source())

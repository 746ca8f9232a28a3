# A marimo notebook: `marimo edit examples/look.py -- runs/DIR`. It also runs as a script.
import marimo

app = marimo.App()


@app.cell
def _():
    import sys
    from pathlib import Path

    import insitu

    folders = [Path(text) for text in sys.argv[1:] if Path(text, "config.toml").is_file()]
    run = insitu.open_run(folders[-1] if folders else max(Path("runs").iterdir()))
    run
    return (run,)


@app.cell
def _(run):
    steps = run.steps
    steps
    return (steps,)


@app.cell
def _(steps):
    loss = steps.column("loss") if steps else []
    print("loss by step:", [round(float(value), 4) for value in loss])
    return (loss,)


@app.cell
def _(run):
    unsolved = run.rollouts(phase="train", outcome="unresolved")
    unsolved
    return (unsolved,)


@app.cell
def _(run, unsolved):
    text = run.transcript(unsolved.ids[-1]) if unsolved else "every rollout was solved"
    print(text)
    return (text,)


@app.cell
def _(unsolved):
    if unsolved:
        tokens = unsolved[-1].tokens()  # numpy: ids, mask, logprobs, versions, segment
        print("trainable tokens:", int(tokens.mask.sum()), "lowest log-probability:", tokens.logprobs.min())
    return


if __name__ == "__main__":
    app.run()

"""FastAPI application of terminus_env: `uvicorn server.app:app`, or `python -m terminus_env.server.app`.

Configured by INSITU_ENV_CONFIG, INSITU_ENV_TRUST_CALLERS, INSITU_ENV_TOKEN and
MAX_CONCURRENT_ENVS (README.md).
"""

from insitu_bridges.openenv.environment import make_app

app = make_app("terminus_env")


def main() -> None:
    """Serve on port 8000."""
    import uvicorn

    uvicorn.run(app, host="0.0.0.0", port=8000)


if __name__ == "__main__":
    main()

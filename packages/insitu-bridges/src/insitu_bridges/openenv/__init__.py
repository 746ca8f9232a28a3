"""OpenEnv environments over insitu's sandboxes, tasks and graders; served by the packages in `envs/`.

    OpenEnv server -> environment.py -> episodes.py (an event loop in a thread) -> sandboxes, grader

`environment` and `agent` import openenv; nothing else of insitu does.
"""

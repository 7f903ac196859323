"""Prefect deployments and servers.

serve: `gradmm serve`: deployments of recipes from this process.
recipe_deployment: the parameters and triggers of one recipe's deployment.
credentials: those of an object store, from a block of the Prefect server.
prefect_server: the Prefect server in use, or a local one started for the while.
server_process: the process of a local server, which ends with the one that started it.
local_run: a flow run here and now, with a server of its own.
notify: the event that starts a deployment when its data have changed.
"""

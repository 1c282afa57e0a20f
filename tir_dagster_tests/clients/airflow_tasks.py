"""Runs in Airflow's environment, without a scheduler: tasks in turn, each given as JSON, and what became of them as JSON.

    python airflow_tasks.py '[{"task": "TableauOperator", "resource": "datasources", …}, {"task": "TableauJobStatusSensor"}]'

A sensor without a job's id watches the job of the task before it.
"""

import json
import sys

from airflow.providers.standard.operators.bash import BashOperator
from airflow.providers.tableau.operators.tableau import TableauOperator
from airflow.providers.tableau.sensors.tableau import TableauJobStatusSensor

TASKS = {task.__name__: task for task in (BashOperator, TableauOperator, TableauJobStatusSensor)}


def run(task, last_result, arguments):
    if task == "TableauJobStatusSensor":
        arguments = {"job_id": last_result, "poke_interval": 0.1, "timeout": 60, **arguments}
    return TASKS[task](task_id="task", **arguments).execute({})


outcomes, result = [], None
for arguments in json.loads(sys.argv[1]):
    try:
        result = run(arguments.pop("task"), result, arguments)
        outcomes.append({"result": result})
    except Exception as error:
        outcomes.append({"error": type(error).__name__, "message": str(error)})
print("OUTCOMES", json.dumps(outcomes))

"""Keras callback that records the metrics of a run in MLflow; a run that is resumed continues its record."""

import keras
from mlflow import MlflowClient

from ringtrain import hvd


class MLflow(keras.callbacks.Callback):
    """Sends the metrics of each epoch from rank 0; they are those of all ranks.

    Args:
        uri: Of an MLflow server, or of another of its stores.
        name: Of the record, as that of the run.
    """

    def __init__(self, uri, name, experiment="ringtrain"):
        super().__init__()
        self.uri, self.name, self.experiment = uri, name, experiment

    def on_epoch_end(self, epoch, logs=None):
        if hvd.rank() == 0:
            client, run_id = self.record()
            for name, value in (logs or {}).items():
                if isinstance(value, float | int):
                    client.log_metric(run_id, name, value, step=epoch)

    def on_train_end(self, logs=None):
        if hvd.rank() == 0:
            client, run_id = self.record()
            client.set_terminated(run_id)

    def record(self):
        """The client, and the ID of the record with this name, which is made if there is none."""
        client = MlflowClient(self.uri)
        known = client.get_experiment_by_name(self.experiment)
        experiment_id = known.experiment_id if known else client.create_experiment(self.experiment)
        found = client.search_runs([experiment_id], f"attributes.run_name = '{self.name}'")
        run = found[0] if found else client.create_run(experiment_id, run_name=self.name)
        return client, run.info.run_id

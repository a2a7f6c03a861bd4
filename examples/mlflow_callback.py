"""Keras callback that records the metrics of a run in MLflow; a run that is resumed continues its MLflow run.

ringtrain.fit(model, x, y, name="first", epochs=10, callbacks=[MLflow("http://localhost:5000")])
"""

import keras
from mlflow import MlflowClient

from ringtrain import hvd


class MLflow(keras.callbacks.Callback):
    """Sends the metrics of each epoch from rank 0; they are those of all ranks.

    Args:
        uri: Of an MLflow server, or of another of its stores.
    """

    def __init__(self, uri, experiment="ringtrain"):
        super().__init__()
        self.uri, self.experiment = uri, experiment
        self.run_id = ""  # checkpoints have texts of callbacks

    def on_epoch_end(self, epoch, logs=None):
        if hvd.rank() != 0:
            return
        client = MlflowClient(self.uri)
        if not self.run_id:
            known = client.get_experiment_by_name(self.experiment)
            experiment_id = known.experiment_id if known else client.create_experiment(self.experiment)
            self.run_id = client.create_run(experiment_id).info.run_id
        for name, value in (logs or {}).items():
            client.log_metric(self.run_id, name, float(value), step=epoch)

    def on_train_end(self, logs=None):
        if hvd.rank() == 0 and self.run_id:
            MlflowClient(self.uri).set_terminated(self.run_id)

"""What launchers set, as their documents show it or as they were seen to."""

import json

VERTEX_CLUSTER = {
    "workerpool0": ["cmle-training-workerpool0-ab-0:2222"],
    "workerpool1": ["cmle-training-workerpool1-ab-0:2222", "cmle-training-workerpool1-ab-1:2222"],
    "workerpool2": ["cmle-training-workerpool2-ab-0:2222", "cmle-training-workerpool2-ab-1:2222"],
    "workerpool3": [
        "cmle-training-workerpool3-ab-0:2222",
        "cmle-training-workerpool3-ab-1:2222",
        "cmle-training-workerpool3-ab-2:2222",
    ],
}
AI_PLATFORM_CLUSTER = {
    "master": ["cmle-training-master-ab-0:2222"],
    "worker": ["cmle-training-worker-ab-0:2222", "cmle-training-worker-ab-1:2222"],
    "ps": ["cmle-training-ps-ab-0:2222"],
    "evaluator": ["cmle-training-evaluator-ab-0:2222"],
}
TUNING_CLUSTER = {
    "chief": ["training-workerpool0-ab-0:2222"],
    "ps": ["training-workerpool2-ab-0:2222"],
    "worker": ["training-workerpool1-ab-0:2222", "training-workerpool1-ab-1:2222"],
}
AZURE_CLUSTER = {"worker": ["host0:2222", "host1:2222"]}


def spec(cluster, kind, index, **task):
    """Return CLUSTER_SPEC or TF_CONFIG of one replica."""
    whole = {
        "cluster": cluster,
        "environment": "cloud",
        "job": {"scale_tier": "CUSTOM"},
        "task": {"type": kind, "index": index, **task},
    }
    return json.dumps(whole)


def vertex(pool, index, **task):
    """Return what Vertex AI sets in a replica: both variables."""
    names = {"workerpool0": "chief", "workerpool1": "worker", "workerpool2": "ps"}
    cluster = {names[task]: VERTEX_CLUSTER[task] for task in names}
    kind = ("chief", "worker", "ps", "evaluator")[pool]
    return {
        "CLUSTER_SPEC": spec(VERTEX_CLUSTER, f"workerpool{pool}", index, **task),
        "TF_CONFIG": spec(cluster, kind, index, **task),
    }


TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_RUN_ID": "run-7",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
ENV = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node0", "MASTER_PORT": "6105"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "PMIX_NAMESPACE": "583925761",
    "PMIX_RANK": "5",
}
AZURE_MPI = {**OPEN_MPI, "AZ_BATCH_MASTER_NODE": "10.0.0.4:6000", "AZUREML_RUN_ID": "run_ab"}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NAME": "train",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "4",
    "SLURM_NTASKS": "5",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_NNODES": "3",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NODELIST": "gpu[01-02],login",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_RESTART_COUNT": "1",
}
KUBEFLOW = {
    "PET_NNODES": "4",
    "PET_NPROC_PER_NODE": "auto",
    "PET_NODE_RANK": "3",
    "PET_MASTER_ADDR": "digits-node-0-0.digits",
    "PET_MASTER_PORT": "29400",
    "JOB_COMPLETION_INDEX": "3",
}

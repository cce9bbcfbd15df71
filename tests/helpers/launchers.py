"""The environment variables that launchers set for a rank."""

TORCHRUN = {
    **{"TORCHELASTIC_RUN_ID": "x", "MASTER_ADDR": "first", "MASTER_PORT": "9"},
    **{"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"},
}
SRUN = {
    **{"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "3", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "first"},
    **{"SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NODEID": "0"},
}

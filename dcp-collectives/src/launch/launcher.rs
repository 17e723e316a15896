//! The launchers and the variables in which each gives rank and world size.

use std::fmt;

use dcp_core::Rank;

use super::error::EnvError;
use super::variables::{Variables, invalid};

/// A program that starts the processes of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Launcher {
    /// `DCP_RANK` and `DCP_WORLD_SIZE`, set by the user.
    Explicit,
    /// torchrun, or another that sets what PyTorch's `env://` reads.
    Torch,
    /// `mpirun` of Open MPI.
    OpenMpi,
    /// `mpirun_rsh` or `mpiexec` of MVAPICH.
    Mvapich,
    /// `mpiexec` of MPICH, of Intel MPI, or another that speaks PMI.
    Pmi,
    /// `srun` of Slurm.
    Slurm,
    /// A launcher that speaks PMIx and sets nothing else.
    Pmix,
    /// An indexed Job of Kubernetes, also as part of a JobSet.
    Kubernetes,
}

impl fmt::Display for Launcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Explicit => "DCP_RANK",
            Self::Torch => "torchrun",
            Self::OpenMpi => "Open MPI",
            Self::Mvapich => "MVAPICH",
            Self::Pmi => "PMI",
            Self::Slurm => "Slurm",
            Self::Pmix => "PMIx",
            Self::Kubernetes => "Kubernetes",
        })
    }
}

/// The position of this process.
#[derive(Clone, Copy, Debug)]
pub(super) struct Found {
    pub(super) launcher: Launcher,
    pub(super) rank: Rank,
    pub(super) world_size: u32,
    pub(super) local_rank: Option<u32>,
}

/// The names of a launcher's variables.
struct Names {
    launcher: Launcher,
    rank: &'static str,
    world_size: &'static str,
    local_rank: Option<&'static str>,
}

const EXPLICIT: Names = Names {
    launcher: Launcher::Explicit,
    rank: "DCP_RANK",
    world_size: "DCP_WORLD_SIZE",
    local_rank: None,
};

const TORCH: Names = Names {
    launcher: Launcher::Torch,
    rank: "RANK",
    world_size: "WORLD_SIZE",
    local_rank: Some("LOCAL_RANK"),
};

/// Launchers that give both numbers, the innermost first: `mpirun` in an allocation of Slurm starts its
/// daemons with `srun`, so that its ranks also have the variables of a step.
const SCHEDULERS: [Names; 4] = [
    Names {
        launcher: Launcher::OpenMpi,
        rank: "OMPI_COMM_WORLD_RANK",
        world_size: "OMPI_COMM_WORLD_SIZE",
        local_rank: Some("OMPI_COMM_WORLD_LOCAL_RANK"),
    },
    Names {
        launcher: Launcher::Mvapich,
        rank: "MV2_COMM_WORLD_RANK",
        world_size: "MV2_COMM_WORLD_SIZE",
        local_rank: Some("MV2_COMM_WORLD_LOCAL_RANK"),
    },
    Names {
        launcher: Launcher::Pmi,
        rank: "PMI_RANK",
        world_size: "PMI_SIZE",
        local_rank: Some("MPI_LOCALRANKID"),
    },
    Names {
        launcher: Launcher::Slurm,
        rank: "SLURM_PROCID",
        world_size: "SLURM_STEP_NUM_TASKS",
        local_rank: Some("SLURM_LOCALID"),
    },
];

/// Launchers that give only a rank.
const WITHOUT_SIZE: [Names; 2] = [
    Names {
        launcher: Launcher::Pmix,
        rank: "PMIX_RANK",
        world_size: "WORLD_SIZE",
        local_rank: None,
    },
    Names {
        launcher: Launcher::Kubernetes,
        rank: "JOB_COMPLETION_INDEX",
        world_size: "WORLD_SIZE",
        local_rank: None,
    },
];

/// Finds the launcher of this process.
pub(super) fn find(variables: &Variables<'_>) -> Result<Option<Found>, EnvError> {
    if variables.is_set(EXPLICIT.rank)? || variables.is_set(EXPLICIT.world_size)? {
        return EXPLICIT.both(variables).map(Some);
    }
    let (rank, size) = (variables.is_set(TORCH.rank)?, variables.is_set(TORCH.world_size)?);
    let on_the_node = rank
        && size
        && (variables.is_set("LOCAL_RANK")? || variables.is_set("TORCHELASTIC_RUN_ID")?);
    if on_the_node {
        return TORCH.both(variables).map(Some);
    }
    for names in &SCHEDULERS {
        if names.launcher == Launcher::Slurm && !is_step_of_slurm(variables)? {
            continue;
        }
        if variables.is_set(names.rank)? || variables.is_set(names.world_size)? {
            let found = names.both(variables)?;
            names.refuse_contradiction(found, variables)?;
            return Ok(Some(if rank && size { TORCH.both(variables)? } else { found }));
        }
    }
    if rank {
        return TORCH.both(variables).map(Some);
    }
    for names in &WITHOUT_SIZE {
        // Pods of an indexed Job that do not belong together have an index, too.
        let counts = size || names.launcher != Launcher::Kubernetes;
        if counts && variables.is_set(names.rank)? {
            return names.both(variables).map(Some);
        }
    }
    if size { TORCH.both(variables).map(Some) } else { Ok(None) }
}

impl Names {
    /// Reads both numbers, of which one is set.
    fn both(&self, variables: &Variables<'_>) -> Result<Found, EnvError> {
        let missing = |variable| EnvError::Missing { variable };
        let world_size = self.world_size(variables)?;
        let (size_name, world_size) = world_size.ok_or_else(|| missing(self.world_size))?;
        let rank = variables.rank(self.rank)?.ok_or_else(|| missing(self.rank))?;
        if rank >= world_size {
            let expected = match size_name {
                "WORLD_SIZE" => "less than WORLD_SIZE",
                "DCP_WORLD_SIZE" => "less than DCP_WORLD_SIZE",
                _ => "less than the number of ranks",
            };
            return Err(invalid(self.rank, rank.to_string(), expected));
        }
        let local_rank = self.local_rank.map(|name| variables.rank(name)).transpose()?.flatten();
        Ok(Found { launcher: self.launcher, rank, world_size, local_rank })
    }

    fn world_size(
        &self,
        variables: &Variables<'_>,
    ) -> Result<Option<(&'static str, u32)>, EnvError> {
        let read = |name| Ok(variables.count(name)?.map(|size| (name, size)));
        match (read(self.world_size)?, self.launcher) {
            (None, Launcher::Slurm) => read("SLURM_NTASKS"),
            (size, _) => Ok(size),
        }
    }

    /// Compares `found` with `RANK` and `WORLD_SIZE`. Those that a shell exports are the same on
    /// all ranks, so every process would be the same rank.
    fn refuse_contradiction(
        &self,
        found: Found,
        variables: &Variables<'_>,
    ) -> Result<(), EnvError> {
        let size_name = self.world_size(variables)?.map_or(self.world_size, |(name, _)| name);
        let pairs = [
            (TORCH.world_size, variables.count(TORCH.world_size)?, size_name, found.world_size),
            (TORCH.rank, variables.rank(TORCH.rank)?, self.rank, found.rank),
        ];
        for (variable, value, other, other_value) in pairs {
            if let Some(value) = value.filter(|value| *value != other_value) {
                return Err(EnvError::Contradiction { variable, value, other, other_value });
            }
        }
        Ok(())
    }
}

/// Whether the process is a task of `srun`. A batch script has no number of a step; interactive
/// shells and other steps that Slurm starts for itself have one near the largest of 32 bits.
fn is_step_of_slurm(variables: &Variables<'_>) -> Result<bool, EnvError> {
    const FIRST_RESERVED: u32 = 0xffff_fff0;
    Ok(variables.rank("SLURM_STEP_ID")?.is_some_and(|step| step < FIRST_RESERVED))
}

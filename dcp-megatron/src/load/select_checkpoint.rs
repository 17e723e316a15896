//! Selects the checkpoint to load. The coordinator decides, because a tracker may move between
//! the reads of two ranks.

use std::sync::Arc;

use dcp_core::error::Phase;
use dcp_core::plan::PlanContext;
use dcp_core::{CheckpointError, Storage, StorageError};
use dcp_engine::Group;
use dcp_jobs::integrity::Problem;
use serde::{Deserialize, Serialize};

use crate::agreement;
use crate::disk::config::CheckpointingConfig;
use crate::disk::manifest::verify_share;
use crate::disk::recovery::recovered;
use crate::disk::tracker::{TRACKER, Tracked};
use crate::error::MegatronError;
use crate::open::checkpoint::MegatronOpenOptions;
use crate::open::legacy::LegacyFolders;
use crate::open::run::MegatronRun;

/// The choice of the coordinator.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Choice {
    /// Of the folder of a run; `None` when the folder is that of a checkpoint, or of none.
    pub(crate) which: Option<Tracked>,
    pub(crate) warning: Option<String>,
}

/// Options of the choice.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rule<'a> {
    pub(crate) fall_back: bool,
    pub(crate) verify_integrity: bool,
    pub(crate) open: &'a MegatronOpenOptions,
}

impl Choice {
    /// The choice for all ranks of a group.
    pub(crate) async fn agree(
        storage: &Arc<dyn Storage>,
        rule: Rule<'_>,
        group: &Group,
    ) -> Result<Self, MegatronError> {
        let found = match group.context().rank {
            0 => Some(Self::find(storage, rule.fall_back).await),
            _ => None,
        };
        let choice: Self = agreement::verdict(group, Phase::Plan, found).await?;
        if rule.verify_integrity {
            choice.verify(storage, rule.open, group).await?;
        }
        Ok(choice)
    }

    /// Compares the files with their manifest, each rank its share of them.
    async fn verify(
        &self,
        storage: &Arc<dyn Storage>,
        open: &MegatronOpenOptions,
        group: &Group,
    ) -> Result<(), MegatronError> {
        let mine = async {
            let place = self.place(storage)?;
            let PlanContext { rank, world_size, .. } = group.context();
            Ok(match verify_share(&place, (rank, world_size), &open.job).await? {
                None => vec!["there is no integrity.json to compare the files with".to_owned()],
                Some(problems) => problems.into_iter().map(in_words).collect(),
            })
        };
        let mine: Result<Vec<String>, MegatronError> = mine.await;
        let mut problems = match group.context().world_size {
            1 => mine?,
            _ => {
                let mine = mine.map_err(|error| agreement::reported(group, Phase::Plan, error));
                group.all_gather_results(Phase::Plan, mine).await?.into_iter().flatten().collect()
            }
        };
        // Every rank has the same errors of the manifest itself.
        problems.sort();
        problems.dedup();
        if problems.is_empty() { Ok(()) } else { Err(MegatronError::Damaged { problems }) }
    }

    /// The folder of the checkpoint.
    pub(crate) fn place(
        &self,
        storage: &Arc<dyn Storage>,
    ) -> Result<Arc<dyn Storage>, StorageError> {
        match self.which {
            Some(which) => MegatronRun::new(Arc::clone(storage)).checkpoint(which),
            None => Ok(Arc::clone(storage)),
        }
    }

    async fn find(storage: &Arc<dyn Storage>, fall_back: bool) -> Result<Self, MegatronError> {
        if is_described(storage).await? {
            return Ok(Self::default());
        }
        let run = MegatronRun::new(Arc::clone(storage));
        let tracked = run.tracked().await;
        if let Ok(Some(tracked)) = tracked
            && is_checkpoint(&run.checkpoint(tracked)?).await?
        {
            return Ok(Self { which: Some(tracked), warning: None });
        }
        // A search for folders of ranks lists all iterations of a run, so the tracker comes first.
        if LegacyFolders::find(&**storage).await?.is_some() {
            return Ok(Self::default());
        }
        let tracked = tracked?;
        if let Some(tracked) = tracked
            && !fall_back
        {
            let folder = tracked.folder()?.to_string();
            return Err(MegatronError::TrackedAbsent { tracked, folder });
        }
        let Some(latest) = run.latest().await? else { return Ok(Self::default()) };
        let warning = tracked.map(|tracked| {
            format!(
                "{TRACKER} says {tracked}, which is not there or not finished; {} is loaded",
                latest.entry.name
            )
        });
        Ok(Self { which: Some(latest.which), warning })
    }
}

fn in_words(problem: Problem) -> String {
    match problem.file {
        Some(file) => format!("{file}: {}", problem.message),
        None => problem.message,
    }
}

/// Whether a folder is marked as a finished checkpoint.
async fn is_checkpoint(storage: &Arc<dyn Storage>) -> Result<bool, MegatronError> {
    Ok(is_described(storage).await? || LegacyFolders::find(&**storage).await?.is_some())
}

/// Whether a folder has a `metadata.json`; beside folders of ranks, that of another program is none.
async fn is_described(storage: &Arc<dyn Storage>) -> Result<bool, MegatronError> {
    match CheckpointingConfig::read(&*recovered(storage).await?).await {
        Err(CheckpointError::Format(_)) if LegacyFolders::find(&**storage).await?.is_some() => {
            Ok(false)
        }
        config => Ok(config?.is_some()),
    }
}

//! Which checkpoint a load reads. The coordinator decides it, since a tracker may move between two
//! ranks' looks at it.

use std::sync::Arc;

use dcp_core::{Phase, Storage, StorageError};
use dcp_engine::Group;
use serde::{Deserialize, Serialize};

use crate::agreement;
use crate::checkpoint::OpenOptions;
use crate::config::CheckpointingConfig;
use crate::error::MegatronError;
use crate::integrity::verify_integrity;
use crate::legacy::LegacyFolders;
use crate::run::MegatronRun;
use crate::tracker::{TRACKER, Tracked};

/// What the coordinator chose.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Choice {
    /// Of the folder of a run; `None` when the folder is that of a checkpoint, or of none.
    pub(crate) which: Option<Tracked>,
    pub(crate) warning: Option<String>,
}

/// How the coordinator chooses.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rule<'a> {
    pub(crate) fall_back: bool,
    pub(crate) verify_integrity: bool,
    pub(crate) open: &'a OpenOptions,
}

impl Choice {
    /// The choice for all ranks of a group.
    pub(crate) async fn agree(
        storage: &Arc<dyn Storage>,
        rule: Rule<'_>,
        group: &Group,
    ) -> Result<Self, MegatronError> {
        let found = match group.context().rank {
            0 => Some(Self::make(storage, rule).await),
            _ => None,
        };
        agreement::verdict(group, Phase::Plan, found).await
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

    async fn make(storage: &Arc<dyn Storage>, rule: Rule<'_>) -> Result<Self, MegatronError> {
        let choice = Self::find(storage, rule.fall_back).await?;
        if rule.verify_integrity {
            let place = choice.place(storage)?;
            let problems = match verify_integrity(&place, &rule.open.job).await? {
                None => vec!["there is no integrity.json to compare the files with".to_owned()],
                Some(problems) => problems
                    .into_iter()
                    .map(|problem| match problem.file {
                        Some(file) => format!("{file}: {}", problem.message),
                        None => problem.message,
                    })
                    .collect(),
            };
            if !problems.is_empty() {
                return Err(MegatronError::Damaged { problems });
            }
        }
        Ok(choice)
    }

    async fn find(storage: &Arc<dyn Storage>, fall_back: bool) -> Result<Self, MegatronError> {
        if is_checkpoint(storage).await? {
            return Ok(Self::default());
        }
        let run = MegatronRun::new(Arc::clone(storage));
        let tracked = run.tracked().await?;
        if let Some(tracked) = tracked {
            if is_checkpoint(&run.checkpoint(tracked)?).await? {
                return Ok(Self { which: Some(tracked), warning: None });
            }
            if !fall_back {
                let folder = tracked.folder()?.to_string();
                return Err(MegatronError::TrackedAbsent { tracked, folder });
            }
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

/// Whether a folder says of itself that it is a finished checkpoint.
async fn is_checkpoint(storage: &Arc<dyn Storage>) -> Result<bool, MegatronError> {
    Ok(CheckpointingConfig::read(&**storage).await?.is_some()
        || LegacyFolders::find(&**storage).await?.is_some())
}

//! Strategies: the readers and writers of each backend and version, in a registry that plug-ins
//! extend.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use dcp_core::value::Dict;
use dcp_core::{CheckpointError, Storage, StorageReader, StorageWriter};
use dcp_formats::dcp::FileLayout;
use dcp_formats::metadata::Profile;

use crate::disk::config::{Backend, CheckpointingConfig};
use crate::disk::tracker::Tracked;
use crate::error::MegatronError;
use crate::open::checkpoint::{MegatronCheckpoint, MegatronOpenOptions};
use crate::writer::{MegatronForm, MegatronWriter};

/// Makes the writers of a backend.
pub trait SaveStrategy: fmt::Debug + Send + Sync {
    /// A writer of one checkpoint into `storage`, with its common state.
    ///
    /// # Errors
    ///
    /// When the backend does not support the settings.
    fn writer(
        &self,
        storage: &Arc<dyn Storage>,
        settings: WriterSettings,
    ) -> Result<Arc<dyn StorageWriter>, MegatronError>;
}

/// The settings of a writer of checkpoints.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct WriterSettings {
    /// All that is not sharded.
    pub common: Dict,
    /// The place of the common state, and so the versions of Megatron-Core that read the
    /// checkpoint.
    pub form: MegatronForm,
    /// The form of the `.metadata` pickle.
    pub profile: Option<Profile>,
    /// The layout of the files that each rank writes.
    pub files: FileLayout,
    /// Whether `integrity.json` is written.
    pub integrity: bool,
    /// Whether an existing checkpoint is replaced.
    pub overwrite: bool,
}

/// Opens the checkpoints of a backend.
#[async_trait]
pub trait LoadStrategy: fmt::Debug + Send + Sync {
    /// The checkpoint in `storage`, which is its folder, never that of a run.
    ///
    /// Of a plug-in, the [`strategies`](MegatronOpenOptions::strategies) in `options` are the default ones:
    /// it can open with them what it only changes a little.
    ///
    /// # Errors
    ///
    /// When it is damaged or none.
    async fn open(
        &self,
        storage: &Arc<dyn Storage>,
        options: &MegatronOpenOptions,
    ) -> Result<Opened, MegatronError>;
}

/// A checkpoint as a load needs it.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Opened {
    /// Tensors under their keys in their logical shapes, and objects under their unique keys, each
    /// a list of one. What is named [`COMMON_STATE`](crate::disk::COMMON_STATE) is left alone.
    pub reader: Arc<dyn StorageReader>,
    /// All that is not sharded.
    pub common: Dict,
    /// The iteration or release of the run whose folder was opened.
    pub which: Option<Tracked>,
    /// The warnings about oddities that did not keep it from being opened.
    pub warnings: Vec<String>,
    /// The damage that was overlooked because it was opened tolerantly.
    pub damage: Vec<String>,
}

impl Opened {
    /// Makes a checkpoint of the entries that `reader` reads, without warnings and damage.
    #[must_use]
    pub fn new(reader: Arc<dyn StorageReader>, common: Dict) -> Self {
        Self { reader, common, which: None, warnings: Vec::new(), damage: Vec::new() }
    }
}

/// Strategies by backend and version, as `metadata.json` names them.
///
/// The default ones write `torch_dist`, and read what
/// [`MegatronCheckpoint`](crate::MegatronCheckpoint) does. Registering another one replaces what
/// was there for the same backend and version.
///
/// [`save`](crate::save()) and [`load`](crate::load()) take them in their options; whatever else
/// opens a checkpoint takes them in [`MegatronOpenOptions::with_strategies`]. The `dcp` command has the
/// default ones and no way to register others: a program of one's own has.
///
/// ```
/// use dcp_megatron::disk::Backend;
/// use dcp_megatron::strategy::Strategies;
///
/// let strategies = Strategies::default();
/// assert!(strategies.save(&Backend::first("torch_dist")).is_ok());
/// let error = strategies.save(&Backend::first("zarr")).unwrap_err();
/// assert!(error.to_string().contains("\"torch_dist\" version 1"), "{error}");
/// ```
#[derive(Clone, Debug)]
pub struct Strategies {
    save: BTreeMap<(Arc<str>, u64), Arc<dyn SaveStrategy>>,
    load: BTreeMap<(Arc<str>, u64), Loads>,
}

#[derive(Clone, Debug)]
struct Loads {
    strategy: Arc<dyn LoadStrategy>,
    /// Whether [`MegatronCheckpoint`] reads it by itself.
    built_in: bool,
}

impl Default for Strategies {
    fn default() -> Self {
        let mut all = Self::empty().with_save(Backend::first("torch_dist"), Arc::new(TorchDist));
        for name in ["torch_dist", "zarr"] {
            let loads = Loads { strategy: Arc::new(AsMegatron), built_in: true };
            all.load.insert((name.into(), 1), loads);
        }
        all
    }
}

impl Strategies {
    /// None at all.
    #[must_use]
    pub fn empty() -> Self {
        Self { save: BTreeMap::new(), load: BTreeMap::new() }
    }

    /// Registers `strategy` for saving to a backend.
    #[must_use]
    #[doc(alias = "register_default_strategy")]
    pub fn with_save(mut self, backend: Backend, strategy: Arc<dyn SaveStrategy>) -> Self {
        self.save.insert((backend.name, backend.version), strategy);
        self
    }

    /// Registers `strategy` for loading from a backend.
    #[must_use]
    #[doc(alias = "register_default_strategy")]
    pub fn with_load(mut self, backend: Backend, strategy: Arc<dyn LoadStrategy>) -> Self {
        let loads = Loads { strategy, built_in: false };
        self.load.insert((backend.name, backend.version), loads);
        self
    }

    /// Returns the strategy that saves to a backend.
    ///
    /// # Errors
    ///
    /// [`MegatronError::NoStrategy`], naming those that are registered.
    #[doc(alias = "get_default_save_sharded_strategy")]
    #[doc(alias = "get_default_save_common_strategy")]
    #[doc(alias = "get_default_strategy")]
    pub fn save(&self, backend: &Backend) -> Result<&Arc<dyn SaveStrategy>, MegatronError> {
        find(&self.save, backend, "saves to")
    }

    /// Returns the strategy that loads from a backend.
    ///
    /// # Errors
    ///
    /// As [`save`](Self::save).
    #[doc(alias = "get_default_load_sharded_strategy")]
    #[doc(alias = "get_default_load_common_strategy")]
    pub fn load(&self, backend: &Backend) -> Result<&Arc<dyn LoadStrategy>, MegatronError> {
        find(&self.load, backend, "loads from").map(|loads| &loads.strategy)
    }

    /// Returns the strategy that a plug-in has registered for loading from a backend.
    pub(crate) fn plugged(&self, backend: &Backend) -> Option<&Arc<dyn LoadStrategy>> {
        let loads = self.load.get(&(Arc::clone(&backend.name), backend.version))?;
        (!loads.built_in).then_some(&loads.strategy)
    }

    /// Opens a checkpoint by what its `metadata.json` names. Where there is none,
    /// [`MegatronCheckpoint`] says what there is instead. The strategies in `options` are passed
    /// over for these.
    ///
    /// # Errors
    ///
    /// As [`load`](Self::load), and those of the strategy.
    #[doc(alias = "verify_checkpoint_and_load_strategy")]
    pub async fn open(
        &self,
        storage: &Arc<dyn Storage>,
        options: &MegatronOpenOptions,
    ) -> Result<Opened, MegatronError> {
        let own = options.clone().with_strategies(self.clone());
        let shown = crate::disk::recovery::recovered(storage).await?;
        let config = match CheckpointingConfig::read(&*shown).await {
            // A file of another program, beside what needs no description.
            Err(CheckpointError::Format(_)) | Ok(None) => {
                return AsMegatron.open(storage, &own).await;
            }
            Ok(Some(config)) => config,
            Err(error) => return Err(error.into()),
        };
        match self.plugged(&config.sharded) {
            Some(strategy) => strategy.open(storage, &own.for_plug_in()).await,
            None => self.load(&config.sharded)?.open(storage, &own).await,
        }
    }
}

fn find<'a, T>(
    strategies: &'a BTreeMap<(Arc<str>, u64), T>,
    backend: &Backend,
    does: &'static str,
) -> Result<&'a T, MegatronError> {
    let wanted = (Arc::clone(&backend.name), backend.version);
    strategies.get(&wanted).ok_or_else(|| MegatronError::NoStrategy {
        does,
        backend: backend.to_string(),
        registered: strategies
            .keys()
            .map(|(name, version)| {
                Backend { name: Arc::clone(name), version: *version }.to_string()
            })
            .collect(),
    })
}

#[derive(Debug)]
struct TorchDist;

impl SaveStrategy for TorchDist {
    fn writer(
        &self,
        storage: &Arc<dyn Storage>,
        settings: WriterSettings,
    ) -> Result<Arc<dyn StorageWriter>, MegatronError> {
        let WriterSettings { common, form, profile, files, integrity, overwrite } = settings;
        let mut writer = MegatronWriter::builder(Arc::clone(storage))
            .common(common)
            .form(form)
            .files(files)
            .integrity(integrity)
            .overwrite(overwrite);
        if let Some(profile) = profile {
            writer = writer.profile(profile);
        }
        Ok(Arc::new(writer.build()))
    }
}

/// Whatever `MegatronCheckpoint` opens.
#[derive(Debug)]
struct AsMegatron;

#[async_trait]
impl LoadStrategy for AsMegatron {
    async fn open(
        &self,
        storage: &Arc<dyn Storage>,
        options: &MegatronOpenOptions,
    ) -> Result<Opened, MegatronError> {
        let checkpoint = MegatronCheckpoint::open(storage, options).await?;
        let reader = Arc::clone(&checkpoint.source().reader);
        Ok(Opened {
            which: checkpoint.which(),
            warnings: checkpoint.warnings().to_vec(),
            damage: checkpoint.damage().to_vec(),
            ..Opened::new(reader, checkpoint.common().clone())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct Plugged;

    #[async_trait]
    impl LoadStrategy for Plugged {
        async fn open(
            &self,
            _: &Arc<dyn Storage>,
            _: &MegatronOpenOptions,
        ) -> Result<Opened, MegatronError> {
            Err(MegatronError::NotACheckpoint { message: "plugged in".to_owned() })
        }
    }

    #[test]
    fn what_is_not_registered_is_named_with_what_is() {
        let newer = Backend { name: "torch_dist".into(), version: 2 };
        let error = Strategies::default().load(&newer).unwrap_err();
        assert_eq!(
            error.to_string(),
            "no registered strategy loads from \"torch_dist\" version 2; registered: \"torch_dist\" version 1, \
             \"zarr\" version 1"
        );
        assert!(
            Strategies::empty().save(&newer).unwrap_err().to_string().ends_with("nothing else")
        );
        let extended = Strategies::default().with_load(newer.clone(), Arc::new(Plugged));
        assert!(extended.load(&newer).is_ok());
    }
}

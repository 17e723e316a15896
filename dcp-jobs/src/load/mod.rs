//! The state of a checkpoint, in memory.

use dcp_core::format::Listing;
use dcp_core::metadata::Layout;
use dcp_core::{CheckpointError, CheckpointMetadata, StateDict, Storage, Value};
use dcp_engine::Loader;
use dcp_planner::{KeyFilter, Template, unflatten};

use crate::checkpoint::Checkpoint;
use crate::checkpoint::chosen_keys::Keys;
use crate::checkpoint::whole::Whole;
use crate::error::Error;
use crate::keys::StatePart;
use crate::options::JobOptions;

impl Checkpoint {
    /// Loads this checkpoint into memory of its own: whole tensors and objects, nested as they were
    /// saved. The names need not be known before.
    ///
    /// ```
    /// # use dcp_jobs::{Keys, Opener};
    /// # use dcp_core::registry::StorageRegistry;
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let mut storages = StorageRegistry::empty();
    /// # storages.register("file", |request| Ok(std::sync::Arc::new(dcp_storage_fs::FsStorage::open(&request.url)?)));
    /// # let url = concat!(env!("CARGO_MANIFEST_DIR"), "/../fixtures/pytorch/fsdp2_adam_2r");
    /// let checkpoint = Opener::new(storages).open(url).await?;
    /// let state = checkpoint.load().run().await?;
    /// let model = checkpoint.load().keys(Keys::all().include("model")).run().await?;
    /// assert!(model.at("model.embed.weight").is_some() && model.len() < state.len());
    /// # Ok(())
    /// # }
    /// ```
    pub fn load(&self) -> Loading<'_> {
        Loading { checkpoint: self, keys: Keys::all() }
    }
}

/// A load into new memory to [`run`](Self::run), from [`Checkpoint::load`].
#[derive(Debug)]
#[must_use = "a load does nothing before `run`"]
pub struct Loading<'a> {
    checkpoint: &'a Checkpoint,
    keys: Keys,
}

impl Loading<'_> {
    /// Loads only these keys, under these names.
    pub fn keys(mut self, keys: Keys) -> Self {
        self.keys = keys;
        self
    }

    /// Loads the state. A tensor whose shape claims more bytes than are stored fails before it is
    /// allocated.
    ///
    /// # Errors
    ///
    /// [`InvalidOption`](crate::ErrorKind::InvalidOption) where no key is chosen,
    /// [`Damaged`](crate::ErrorKind::Damaged), and when the storage fails.
    pub async fn run(self) -> Result<StateDict, Error> {
        let selection = self.keys.selection(StatePart::Everything);
        let checkpoint = Whole::of_keys(self.checkpoint, &selection.needed()).await?;
        let source = selection.apply(&checkpoint.source, &JobOptions::default()).await?;
        let metadata = source.metadata().await?;
        let computed = match computes(&metadata) {
            true => stored_bytes(&*checkpoint.storage).await?,
            false => 0,
        };
        let template = Template::whole_within(&metadata, &KeyFilter::all(), computed);
        let template = template.map_err(CheckpointError::from)?;
        // It stays flat while it is loaded: flattened again, lists that held empty dicts would have
        // gaps, which the checkpoint does not have.
        let mut flat = StateDict::new();
        for leaf in template.leaves() {
            flat.insert(leaf.fqn.clone(), leaf.value.clone());
        }
        Loader::new().load(&mut flat, &*source.reader).await?;
        let loaded = template.leaves().iter().map(|leaf| {
            let value = flat.remove(&leaf.fqn).unwrap_or(Value::None);
            (leaf.place(), value)
        });
        Ok(unflatten(loaded).map_err(CheckpointError::from)?)
    }
}

/// Whether the reader computes tensors, as it merges those of several ranks.
fn computes(metadata: &CheckpointMetadata) -> bool {
    metadata.encodings().iter().any(|encoding| encoding.layout == Layout::Computed)
}

/// The bytes of all files of the folder.
async fn stored_bytes(storage: &dyn Storage) -> Result<u64, Error> {
    let listing = Listing::read(storage, &[]).await?;
    Ok(listing.objects().iter().fold(0, |sum: u64, meta| sum.saturating_add(meta.byte_len)))
}

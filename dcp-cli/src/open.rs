//! From what was typed to a checkpoint to read.

use std::path::Path;
use std::sync::{Arc, OnceLock};

use dcp::convert::Source;
use dcp::core::{CheckpointError, Key, Storage, StorageError, StorageErrorKind, StorageExt};
use dcp::formats::detect::{Detected, Detection, detect};
use dcp::formats::folder::OLMO_MODEL;
use dcp::megatron::{HALF_REPLACED, METADATA_JSON, MegatronCheckpoint, OpenOptions, recovered};
use dcp::{Access, StorageRegistry};

use crate::failure::{Exit, Failure};
use crate::folder::{is_dcp, is_megatron, model_file, split};
use crate::incomplete_save::Unfinished;
pub(crate) use crate::interrupt::run;
use crate::iteration;
use crate::output::Output;
use crate::sidecar_config::WEIGHTS;
use crate::summary::list;
use crate::torch_folder;

/// Whether links that lead out of a folder are followed; set once, by the command line.
static FOLLOW_LINKS: OnceLock<()> = OnceLock::new();

/// The variant of Hugging Face models that is read; set once, by the command line.
static VARIANT: OnceLock<String> = OnceLock::new();

/// Lets this variant be read of all models that are opened from now on.
pub(crate) fn read_variant(name: &str) {
    VARIANT.get_or_init(|| name.to_owned());
}

/// The rank whose tensors and objects are read where ranks differ; set once, by the command line.
static RANK: OnceLock<u32> = OnceLock::new();

/// Lets what this rank has be read of all that is opened from now on.
pub(crate) fn read_rank(rank: u32) {
    RANK.get_or_init(|| rank);
}

/// Lets all that is opened from now on follow links.
pub(crate) fn follow_links() {
    FOLLOW_LINKS.get_or_init(|| ());
}

/// The storages that can be opened.
pub(crate) fn registry() -> StorageRegistry {
    let registry = StorageRegistry::with_defaults();
    if FOLLOW_LINKS.get().is_some() { registry.following_links() } else { registry }
}

/// How whole a checkpoint has to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Need {
    /// It is only looked at, as far as it can be.
    Readable,
    /// All of it is taken somewhere.
    Whole,
}

impl Need {
    fn tolerant(self) -> bool {
        self == Self::Readable
    }
}

/// A checkpoint that was opened to read.
#[derive(Debug)]
pub(crate) struct Opened {
    /// What was typed.
    pub(crate) uri: String,
    /// Where it lies: what was typed, or a folder in it.
    pub(crate) place: String,
    /// What jobs read.
    pub(crate) source: Source,
    /// What that lies in.
    pub(crate) folder: Arc<dyn Storage>,
    /// Whether that is the checkpoint's own folder, and not the one that its only file is in.
    pub(crate) is_folder: bool,
    /// The same for Megatron-Core, if it is one of its checkpoints.
    pub(crate) megatron: Option<MegatronCheckpoint>,
    /// What shows that the save did not finish, although all can be read.
    pub(crate) unfinished: Option<Unfinished>,
    /// What is wrong with the tracker of the run whose latest checkpoint it is.
    pub(crate) wrong_tracker: Option<String>,
}

/// Opens a checkpoint to read: a directory, or one file of safetensors or `torch.save`, which are
/// told from each other by what they begin with. Says which of several is taken.
pub(crate) async fn checkpoint(uri: &str, need: Need, out: &Output) -> Result<Opened, Failure> {
    let opened = |place: String, folder: &Arc<dyn Storage>, source, megatron| Opened {
        uri: uri.to_owned(),
        place,
        source,
        folder: Arc::clone(folder),
        is_folder: true,
        megatron,
        unfinished: None,
        wrong_tracker: None,
    };
    let registry = registry();
    let storage = match registry.open(uri, Access::Read) {
        Ok(storage) => storage,
        Err(error) => {
            return match file(uri).await {
                Some((storage, key)) => {
                    let source = file_source(uri, Arc::clone(&storage), key, need).await?;
                    if let Some(save) = source.save_reader() {
                        save.notes().await?.iter().for_each(|note| out.note(note));
                    }
                    let opened = opened(uri.to_owned(), &storage, source, None);
                    Ok(Opened { is_folder: false, ..opened })
                }
                None => Err(cannot_open(uri, &error)),
            };
        }
    };
    let place = place(uri, &storage).await?;
    if let Some(note) = &place.note {
        out.note(note);
    }
    let Place { uri: place, wrong_tracker, .. } = place;
    let storage = if place == uri { storage } else { registry.open(&place, Access::Read)? };
    let stored = storage;
    let storage = recovered(&stored).await?;
    if !Arc::ptr_eq(&storage, &stored) {
        out.note(HALF_REPLACED);
    }
    if let Some(checkpoint) = megatron_checkpoint(&place, &storage, need).await? {
        for warning in checkpoint.damage().iter().chain(checkpoint.warnings()) {
            out.note(warning);
        }
        let opened = opened(place, &storage, checkpoint.source().clone(), Some(checkpoint));
        return Ok(Opened { wrong_tracker, ..opened });
    }
    if let Some(variant) = VARIANT.get() {
        let source = variant_of(&place, &storage, variant, need).await?;
        return Ok(opened(place, &storage, source, None));
    }
    match open_folder(&storage, need).await {
        Ok(source) => {
            settle_ranks(uri, &source, need, out).await?;
            say_variants(&source.variants().await?, out);
            let mut opened = opened(place, &storage, source, None);
            opened.unfinished = Unfinished::find(&*storage, &opened.source).await?;
            if let Some(unfinished) = &opened.unfinished {
                out.note(&unfinished.note());
            }
            Ok(opened)
        }
        Err(error) if is_missing(&error) => {
            if let Ok(Some(last)) = iteration::untracked(uri, &storage).await {
                out.note(&last.note);
                let opened = Box::pin(checkpoint(&below(uri, &last.folder), need, out)).await?;
                return Ok(Opened { uri: uri.to_owned(), ..opened });
            }
            if let Some(source) = torch_folder::open(&storage, None, need.tolerant()).await? {
                return Ok(opened(place, &storage, source, None));
            }
            match detect(&storage).await {
                Ok(detection) => Err(no_checkpoint(uri, &storage, &detection, error).await),
                Err(_) => Err(error.into()),
            }
        }
        Err(error) => {
            if let (Need::Whole, None, CheckpointError::Format(_)) = (need, RANK.get(), &error) {
                // Tensors of ranks that differ in dtype or shape need a choice, too.
                let looked_at = Source::dcp(Arc::clone(&storage), true);
                if looked_at.metadata().await.is_ok() {
                    settle_ranks(uri, &looked_at, need, &out.silent()).await?;
                }
            }
            Err(cannot_read(uri, error))
        }
    }
}

/// Opens the checkpoint in a folder, with what the rank has that was asked for.
async fn open_folder(storage: &Arc<dyn Storage>, need: Need) -> Result<Source, CheckpointError> {
    let Some(rank) = RANK.get() else { return Source::open(storage, need.tolerant()).await };
    let source = Source::dcp_of_rank(Arc::clone(storage), need.tolerant(), *rank);
    source.metadata().await?;
    Ok(source)
}

/// Says what is odd of ranks that saved without collectives. Where they differ, what takes the
/// checkpoint somewhere needs a rank.
async fn settle_ranks(uri: &str, source: &Source, need: Need, out: &Output) -> Result<(), Failure> {
    let Some(reader) = source.dcp_reader() else { return Ok(()) };
    let (differing, rank) = (reader.differing().await?, RANK.get());
    let usage = |message| Failure::new(Exit::Usage, message);
    match rank {
        Some(_) if differing.is_empty() => {
            let message = format!("--rank is for ranks that differ, and those of {uri:?} do not");
            return Err(usage(message).hint("leave it out"));
        }
        Some(rank) if !differing.iter().any(|one| one.ranks().contains(rank)) => {
            let message = format!("rank {rank} has nothing in {uri:?} that differs among ranks");
            let mut ranks: Vec<_> = differing.iter().flat_map(|one| one.ranks()).collect();
            ranks.sort_unstable();
            ranks.dedup();
            let names: Vec<Arc<str>> = ranks.iter().map(|rank| rank.to_string().into()).collect();
            return Err(usage(message).hint(format!("ranks that have: {}", list(&names))));
        }
        None if !differing.is_empty() && need == Need::Whole => {
            let names: Vec<_> = differing.iter().map(|one| Arc::clone(&one.fqn)).collect();
            let message = format!(
                "{uri:?}: the ranks saved without collectives and differ in {}",
                list(&names)
            );
            return Err(usage(message).hint("--rank N takes what rank N has"));
        }
        _ => {}
    }
    for warning in &*reader.rank_warnings().await? {
        out.note(warning);
    }
    if rank.is_none() && !differing.is_empty() {
        out.note("--rank N shows what another rank has");
    }
    Ok(())
}

/// Opens a variant of the model in a folder.
async fn variant_of(
    uri: &str,
    storage: &Arc<dyn Storage>,
    variant: &str,
    need: Need,
) -> Result<Source, Failure> {
    let tolerant = need.tolerant();
    let source =
        Source::hf_with(Arc::clone(storage), |reader| reader.variant(variant).tolerant(tolerant));
    match source.metadata().await {
        Ok(_) => Ok(source),
        Err(error) if is_missing(&error) => {
            match torch_folder::open(storage, Some(variant), tolerant).await? {
                Some(source) => Ok(source),
                None => Err(Failure::new(Exit::Usage, format!("{uri:?}: {error}"))
                    .hint("leave --variant out to read the main files")),
            }
        }
        Err(error) => Err(cannot_read(uri, error)),
    }
}

/// Says which files of a model are not read because they hold it in another form.
fn say_variants(variants: &[Key], out: &Output) {
    if let Some(first) = variants.first() {
        let more = match variants.len() {
            1 => String::new(),
            n => format!(" and {} more", n - 1),
        };
        out.note(&format!("not reading {first:?}{more}; --variant NAME reads a variant"));
    }
}

/// Opens the checkpoint of Megatron-Core in a folder; `None` where there is none.
async fn megatron_checkpoint(
    uri: &str,
    storage: &Arc<dyn Storage>,
    need: Need,
) -> Result<Option<MegatronCheckpoint>, Failure> {
    if !is_megatron(&**storage).await? {
        return Ok(None);
    }
    let options = OpenOptions::default().with_tolerant(need == Need::Readable);
    match MegatronCheckpoint::open(storage, &options).await {
        Ok(checkpoint) => Ok(Some(checkpoint)),
        Err(error) => Err(cannot_read(uri, error)),
    }
}

fn cannot_read(uri: &str, error: impl Into<Failure>) -> Failure {
    error.into().context(format!("cannot read {uri:?}")).without_hint()
}

/// Whether there is no checkpoint, rather than a bad one.
fn is_missing(error: &CheckpointError) -> bool {
    match error {
        CheckpointError::NotACheckpoint { .. } => true,
        CheckpointError::Storage(error) => error.kind() == StorageErrorKind::NotFound,
        _ => false,
    }
}

/// Where the checkpoint in a directory lies.
struct Place {
    uri: String,
    /// Which of several it is.
    note: Option<String>,
    /// What is wrong with the tracker that says so.
    wrong_tracker: Option<String>,
}

fn below(uri: &str, folder: &str) -> String {
    format!("{}/{folder}", uri.trim_end_matches('/'))
}

/// The place of the checkpoint in a directory: `model_and_optim` in a step of OLMo-core, `weights`
/// in a checkpoint of NeMo, the latest iteration in a run of Megatron-LM, the directory itself otherwise.
async fn place(uri: &str, storage: &Arc<dyn Storage>) -> Result<Place, Failure> {
    let contains = async |name: &str| storage.contains(&Key::new(name)?).await;
    let at = |uri: String| Place { uri, note: None, wrong_tracker: None };
    if !contains(".metadata").await? {
        for folder in [OLMO_MODEL, WEIGHTS] {
            if contains(&format!("{folder}/.metadata")).await? {
                return Ok(at(below(uri, folder)));
            }
        }
        if !contains(METADATA_JSON).await?
            && let Some(iteration) = iteration::of_run(uri, storage).await?
        {
            let (note, wrong_tracker) = (Some(iteration.note), iteration.wrong);
            return Ok(Place { uri: below(uri, &iteration.folder), note, wrong_tracker });
        }
    }
    Ok(at(uri.to_owned()))
}

/// The place of a checkpoint that is there, to change something in it, or only to say what would
/// be changed.
pub(crate) async fn checkpoint_to_change(
    uri: &str,
    dry_run: bool,
) -> Result<Arc<dyn Storage>, Failure> {
    let registry = registry();
    // Opened for writing, a directory that is not there would be made.
    let storage = registry.open(uri, Access::Read).map_err(|error| cannot_open(uri, &error))?;
    let uri = place(uri, &storage).await?.uri;
    let access = if dry_run { Access::Read } else { Access::Write };
    let storage = registry.open(&uri, access).map_err(|error| cannot_open(&uri, &error))?;
    if !Arc::ptr_eq(&recovered(&storage).await?, &storage) {
        return Err(Failure::new(Exit::Bad, format!("{uri:?}: {HALF_REPLACED}")));
    }
    #[cfg(test)]
    let storage = crate::every_operation::faulty(storage);
    Ok(storage)
}

pub(crate) fn cannot_open(uri: &str, error: &StorageError) -> Failure {
    match error.kind() {
        StorageErrorKind::NotFound => {
            Failure::new(Exit::Io, format!("there is nothing at {uri:?}"))
        }
        StorageErrorKind::Unsupported => Failure::new(Exit::Usage, error.to_string()),
        _ if Path::new(uri).is_file() => {
            Failure::new(Exit::Usage, format!("{uri:?} is a file, and a directory is needed"))
        }
        _ => Failure::new(Exit::Io, dcp::core::error_chain(error))
            .context(format!("cannot open {uri:?}")),
    }
}

/// The storage and key of a URI that names a file.
async fn file(uri: &str) -> Option<(Arc<dyn Storage>, Key)> {
    let (parent, name) = split(uri)?;
    let storage = registry().open(&parent, Access::Read).ok()?;
    let key = Key::new(name).ok()?;
    storage.stat(&key).await.ok()?;
    Some((storage, key))
}

async fn file_source(
    uri: &str,
    storage: Arc<dyn Storage>,
    key: Key,
    need: Need,
) -> Result<Source, Failure> {
    let name = key.file_name();
    if name.ends_with(".distcp") || name.ends_with(".metadata") {
        let (parent, _) = split(uri).unwrap_or_default();
        return Err(Failure::new(Exit::Bad, format!("{uri:?} is one file of a checkpoint"))
            .hint(format!("pass the directory: {parent}")));
    }
    Source::open_file(&storage, key, need.tolerant()).await.map_err(|error| match error {
        CheckpointError::NotACheckpoint { .. } => {
            let hint = "a checkpoint is a directory with a .metadata, or a file of torch.save or \
                        safetensors";
            Failure::new(Exit::Bad, format!("{uri:?} is a file, but no checkpoint")).hint(hint)
        }
        error => cannot_read(uri, error),
    })
}

/// Explains why a directory is no checkpoint, and names one that is near.
async fn no_checkpoint(
    uri: &str,
    storage: &Arc<dyn Storage>,
    detection: &Detection,
    error: CheckpointError,
) -> Failure {
    let failure = match &detection.kind {
        Detected::Dcp | Detected::DcpRankLocal { .. } => return Failure::from(error),
        Detected::Empty => Failure::new(Exit::Bad, format!("{uri:?} is an empty directory")),
        kind => {
            let mut message = format!("{uri:?} is no checkpoint: the directory {kind}");
            for also in &detection.also {
                message.push_str(&format!("; it also {also}"));
            }
            Failure::new(Exit::Bad, message)
        }
    };
    let below = |key: &Key| match uri.trim_end_matches('/') {
        "." => key.to_string(),
        base => format!("{base}/{key}"),
    };
    match &*detection.checkpoints {
        [] => failure,
        [one] => failure.hint(format!("there is a checkpoint below it: {}", below(one))),
        [.., last] => {
            let latest = dcp::convert::list_run(storage).await.ok().and_then(|run| run.latest);
            let latest = latest.and_then(|name| Key::new(name).ok());
            failure.hint(match latest {
                Some(name) => format!(
                    "the latest complete checkpoint below it is {}; `dcp ls` lists all",
                    below(&name)
                ),
                None => format!(
                    "there are {} checkpoints below it, such as {}; `dcp ls` lists all",
                    detection.checkpoints.len(),
                    below(last)
                ),
            })
        }
    }
}

/// Says of a directory that is two checkpoints at once which of them is taken.
pub(crate) async fn say_which(uri: &str, out: &Output) -> Result<(), Failure> {
    let Ok(storage) = registry().open(uri, Access::Read) else {
        return Ok(());
    };
    if is_dcp(&*storage).await?
        && let Some(key) = model_file(&*storage).await?
    {
        out.note(&format!(
            "{uri:?} is a checkpoint of PyTorch's format, which is taken; {:?} of another \
             checkpoint lies there, too",
            key.as_str()
        ));
    }
    Ok(())
}

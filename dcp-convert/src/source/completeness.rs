//! Whether the files that an index names are there and long enough, without a look into them.

use std::collections::BTreeSet;

use dcp_core::{
    CheckpointMetadata, Entry, FormatError, Key, Storage, StorageError, StorageErrorKind,
    StorageExt,
};
use dcp_formats::hf::{INDEX_NAME, IndexFile, SINGLE_NAME};
use dcp_formats::metadata::decode;
use futures_util::StreamExt;

/// Larger indexes are not read.
const INDEX_BYTES_MAX: u64 = 1 << 20;
/// Files of one index that are looked at.
const FILES_MAX: usize = 1024;
const NO_DATA: &str = "there are no data files";
/// Where the directory of an archive of `torch.save` ends: a record of 22 bytes, behind which a
/// comment of 64 KiB could stand.
const TAIL_BYTES: u64 = (64 << 10) + 22;

/// What the folder of a DCP checkpoint lacks of what its `.metadata` names; `None` when nothing
/// is found lacking. Of an index of 1 MiB and more, which is not read, any data file will do.
pub(crate) async fn dcp_problem(
    storage: &dyn Storage,
    folder: &str,
) -> Result<Option<String>, StorageError> {
    let key = within(folder, ".metadata")?;
    let byte_len = match storage.stat(&key).await {
        Ok(meta) => meta.byte_len,
        // The metadata of each rank is its own.
        Err(error) if error.kind() == StorageErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    if byte_len >= INDEX_BYTES_MAX {
        let any = any_data(storage, folder).await?;
        return Ok((!any).then(|| NO_DATA.to_owned()));
    }
    let bytes = storage.read_range(&key, 0..byte_len).await?;
    let metadata = match decode(&bytes) {
        Ok(metadata) => metadata,
        Err(error) => return Ok(Some(unreadable(".metadata", &error))),
    };
    let ends = ends(&metadata);
    let mut lacking = Lacking::default();
    for (file, end) in metadata.files().iter().zip(ends).take(FILES_MAX) {
        lacking.look(storage, folder, file, end).await?;
    }
    Ok(lacking.in_words())
}

/// The same of the folder of a checkpoint of Megatron-Core, which needs a `metadata.json` that says
/// something, and a common state.
pub(crate) async fn megatron_problem(
    storage: &dyn Storage,
    folder: &str,
) -> Result<Option<String>, StorageError> {
    /// In bytes; longer ones are not read.
    const CONFIG_BYTES_MAX: u64 = 1 << 16;
    const COMMON_INSIDE: &str = "common_state/shard_0_1";
    let byte_len = async |name: &str| match storage.stat(&within(folder, name)?).await {
        Ok(meta) => Ok(Some(meta.byte_len)),
        Err(error) if error.kind() == StorageErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    };
    let Some(config) = byte_len("metadata.json").await? else { return Ok(None) };
    if config <= CONFIG_BYTES_MAX {
        let json = storage.read_range(&within(folder, "metadata.json")?, 0..config).await?;
        let json = serde_json::from_slice::<serde_json::Value>(&json);
        if !json.is_ok_and(|json| json.is_object()) {
            return Ok(Some("the metadata.json cannot be read".to_owned()));
        }
    }
    if let Some(problem) = dcp_problem(storage, folder).await? {
        return Ok(Some(problem));
    }
    match byte_len("common.pt").await? {
        Some(0) => return Ok(Some("the common.pt is empty".to_owned())),
        Some(_) => return Ok(None),
        None => {}
    }
    let index = within(folder, ".metadata")?;
    let inside = match byte_len(".metadata").await? {
        None => false,
        Some(byte_len) if byte_len >= INDEX_BYTES_MAX => true,
        Some(byte_len) => decode(&storage.read_range(&index, 0..byte_len).await?)
            .is_ok_and(|metadata| metadata.get(COMMON_INSIDE).is_some()),
    };
    Ok((!inside).then(|| "there is no common.pt".to_owned()))
}

/// The same of the folder of a Hugging Face model, whose index says which files there are.
pub(crate) async fn hugging_face_problem(
    storage: &dyn Storage,
    folder: &str,
) -> Result<Option<String>, StorageError> {
    match storage.stat(&within(folder, SINGLE_NAME)?).await {
        // Loaders take it, whatever an index says.
        Ok(_) => return Ok(None),
        Err(error) if error.kind() == StorageErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    let key = within(folder, INDEX_NAME)?;
    let byte_len = match storage.stat(&key).await {
        Ok(meta) => meta.byte_len,
        Err(error) if error.kind() == StorageErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    if byte_len >= INDEX_BYTES_MAX {
        return Ok(None);
    }
    let bytes = storage.read_range(&key, 0..byte_len).await?;
    let index = match IndexFile::parse(&bytes) {
        Ok(index) => index,
        Err(error) => return Ok(Some(unreadable(INDEX_NAME, &error))),
    };
    let files: BTreeSet<&Key> = index.files().collect();
    let mut lacking = Lacking::default();
    for file in files.into_iter().take(FILES_MAX) {
        lacking.look(storage, folder, file, 0).await?;
    }
    Ok(lacking.in_words())
}

/// What an archive of `torch.save` lacks: it is written from front to back, and its directory is
/// at the end. Of a stream from before PyTorch 1.6 nothing can be said.
pub(crate) async fn torch_save_problem(
    storage: &dyn Storage,
    key: &Key,
) -> Result<Option<String>, StorageError> {
    let byte_len = storage.stat(key).await?.byte_len;
    let head = storage.read_range(key, 0..byte_len.min(4)).await?;
    if head != b"PK\x03\x04"[..] {
        return Ok(None);
    }
    let tail = storage.read_range(key, byte_len.saturating_sub(TAIL_BYTES)..byte_len).await?;
    let ends = tail.windows(4).any(|window| window == b"PK\x05\x06");
    Ok((!ends).then(|| "the end of the file is missing: the save did not finish".to_owned()))
}

async fn any_data(storage: &dyn Storage, folder: &str) -> Result<bool, StorageError> {
    let prefix = if folder == "." { None } else { Some(Key::new(folder)?) };
    let mut objects = storage.list(prefix.as_ref());
    while let Some(meta) = objects.next().await {
        if meta?.key.as_str().ends_with(".distcp") {
            return Ok(true);
        }
    }
    Ok(false)
}

fn unreadable(name: &str, error: &FormatError) -> String {
    format!("the {name} cannot be read: {}", error.problem())
}

fn within(folder: &str, name: &str) -> Result<Key, StorageError> {
    Ok(match folder {
        "." => Key::new(name)?,
        _ => Key::new(format!("{folder}/{name}"))?,
    })
}

/// For each file, where the last of what lies in it ends.
fn ends(metadata: &CheckpointMetadata) -> Vec<u64> {
    let mut ends = vec![0_u64; metadata.files().len()];
    for (_, entry) in metadata.iter() {
        let (chunks, object) = match entry {
            Entry::Tensor(tensor) => (Some(&tensor.chunks), None),
            Entry::Object(object) => (None, object.placement),
            _ => (None, None),
        };
        let chunks =
            chunks.into_iter().flat_map(|chunks| chunks.iter()).filter_map(|c| c.placement);
        for placement in chunks.chain(object) {
            if let Some(end) = ends.get_mut(placement.file.index()) {
                *end = (*end).max(placement.byte_offset.saturating_add(placement.byte_len));
            }
        }
    }
    ends
}

/// Files that are not as they should be.
#[derive(Debug, Default)]
struct Lacking {
    looked_at: usize,
    missing: Vec<String>,
    short: Vec<String>,
}

impl Lacking {
    /// Whether `file` has at least `end` bytes.
    async fn look(
        &mut self,
        storage: &dyn Storage,
        folder: &str,
        file: &Key,
        end: u64,
    ) -> Result<(), StorageError> {
        self.looked_at += 1;
        match storage.stat(&within(folder, file.as_str())?).await {
            Ok(meta) if meta.byte_len < end => self
                .short
                .push(format!("{file} has {} bytes, the checkpoint needs {end}", meta.byte_len)),
            Ok(_) => {}
            Err(error) if error.kind() == StorageErrorKind::NotFound => {
                self.missing.push(file.to_string());
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }

    fn in_words(&self) -> Option<String> {
        match (&*self.missing, &*self.short) {
            ([], []) => None,
            (missing, _) if missing.len() == self.looked_at && missing.len() > 1 => {
                Some(NO_DATA.to_owned())
            }
            ([file], _) => Some(format!("{file} is missing")),
            ([file, others @ ..], _) => {
                Some(format!("{file} is missing, and so are {} more", others.len()))
            }
            ([], [problem]) => Some(problem.clone()),
            ([], [problem, others @ ..]) => {
                Some(format!("{problem}; {} more are too short", others.len()))
            }
        }
    }
}

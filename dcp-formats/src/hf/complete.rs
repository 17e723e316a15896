//! Determines whether the files of a folder without an index are a whole model.

use std::collections::{BTreeMap, BTreeSet};

use dcp_core::storage::StorageExt as _;
use dcp_core::text::counted;
use dcp_core::{CheckpointError, Key, Storage, StorageError, StorageErrorKind};

use super::ENDING;
use super::finding::{Finding, FindingKind};
use super::layout::SINGLE_NAME;
use super::sidecar_files::{CONFIG_ASIDE, CONFIG_NAME};
use crate::safetensors::INDEX_ENDING;

/// A file that exists while a writer writes files whose names do not count each other. With it and
/// without an index, the model is incomplete.
pub const UNFINISHED_NAME: &str = "model.unfinished";
/// The minimum number of digits in the numbers of file names.
const DIGITS_MIN: usize = 5;
/// The maximum number of missing files that are named per series.
const NAMED_MAX: usize = 8;

/// The implications of the names of tensor files, in a folder without an index.
#[derive(Debug, Default)]
pub(super) struct Names {
    /// The files to read.
    pub(super) keys: Vec<Key>,
    /// Evidence that the model is incomplete.
    pub(super) findings: Vec<Finding>,
    /// Observations that are not errors.
    pub(super) notes: Vec<String>,
}

impl Names {
    /// Examines the file names of one folder.
    ///
    /// A name such as `model-00001-of-00002.safetensors` implies the other files that it counts,
    /// and an index, which is written last. Next to a `model.safetensors`, which loaders prefer,
    /// such files stem from an unfinished write.
    pub(super) fn look(keys: Vec<Key>) -> Self {
        let has_single = keys.iter().any(|key| key.file_name() == SINGLE_NAME);
        if has_single {
            let (left, keys): (Vec<_>, Vec<_>) = keys
                .into_iter()
                .partition(|key| series(key.file_name()).is_some_and(|(s, _)| s.is_models()));
            let notes = match left.first() {
                Some(first) => vec![format!(
                    "left out {} of a model that was not written to its end, such as {first:?}: no \
                     index names it, and {SINGLE_NAME} is the model",
                    counted(left.len() as u64, "file")
                )],
                None => Vec::new(),
            };
            return Self { keys, findings: Vec::new(), notes };
        }
        let mut all: BTreeMap<Series, BTreeSet<u32>> = BTreeMap::new();
        let mut of_ranks: BTreeMap<u64, BTreeSet<u64>> = BTreeMap::new();
        let mut folder = "";
        for key in &keys {
            let name = key.file_name();
            if let Some((series, number)) = series(name) {
                all.entry(series).or_default().insert(number);
                folder = key.as_str().strip_suffix(name).unwrap_or_default();
            } else if let Some((number, count)) = numbered(name) {
                of_ranks.entry(count).or_default().insert(number);
            }
        }
        let findings = all.iter().flat_map(|(series, there)| series.findings(there, folder));
        let findings = findings.collect();
        // Not necessarily a loss: PyTorch writes no file for a number without tensors.
        let notes = of_ranks.iter().find(|(count, there)| **count != there.len() as u64);
        let notes = notes.map(|(count, there)| {
            format!("the names of the files count {count} of them, there are {}", there.len())
        });
        let notes = notes.into_iter().collect();
        Self { keys, findings, notes }
    }
}

/// A series of files that count each other: the name before the number, and the count.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Series {
    stem: String,
    count: u32,
}

impl Series {
    /// Whether loaders search for files of this name.
    fn is_models(&self) -> bool {
        self.untagged() == "model"
    }

    /// The name without the tag that a file gets when its name is taken.
    pub(super) fn untagged(&self) -> &str {
        let tag = self.stem.rsplit_once("-g");
        match tag.filter(|(_, tag)| !tag.is_empty() && tag.bytes().all(|b| b.is_ascii_digit())) {
            Some((name, _)) => name,
            None => &self.stem,
        }
    }

    fn findings(&self, there: &BTreeSet<u32>, folder: &str) -> Vec<Finding> {
        let Self { stem, count } = self;
        let missing = (1..=*count).filter(|number| !there.contains(number)).take(NAMED_MAX);
        let mut findings: Vec<Finding> = missing
            .map(|number| {
                let name = format!("{folder}{stem}-{number:05}-of-{count:05}{ENDING}");
                let message = format!("{name:?}, which the names of other files count, is missing");
                Self::finding(FindingKind::MissingFile, message, &name)
            })
            .collect();
        let name = format!("{folder}{}{INDEX_ENDING}", self.untagged());
        let message = format!(
            "{name:?}, which names as {stem}-00001-of-{count:05}{ENDING} promise, is missing: the \
             model was not written to its end, or not copied as a whole"
        );
        findings.push(Self::finding(FindingKind::MissingIndex, message, &name));
        findings
    }

    fn finding(kind: FindingKind, message: String, name: &str) -> Finding {
        let finding = Finding::new(kind, message);
        match Key::new(name) {
            Ok(key) => finding.within(&key),
            Err(_) => finding,
        }
    }
}

/// The series and number of a file. Files of a rank's parts
/// (`shard-00001-model-00001-of-00001.safetensors`) have no index.
pub(super) fn series(name: &str) -> Option<(Series, u32)> {
    series_of(name.strip_suffix(ENDING)?)
}

/// The series and number of a file, by its name without the ending.
fn series_of(name: &str) -> Option<(Series, u32)> {
    let (front, count) = name.rsplit_once("-of-")?;
    let (stem, number) = front.rsplit_once('-')?;
    let parse = |text: &str| -> Option<u32> {
        let plain = text.len() >= DIGITS_MIN && text.bytes().all(|byte| byte.is_ascii_digit());
        text.parse().ok().filter(|_| plain)
    };
    let (number, count) = (parse(number)?, parse(count)?);
    let is_ranks = stem.strip_prefix("shard-").is_some_and(|rest| {
        rest.split_once('-').is_some_and(|(rank, _)| rank.bytes().all(|b| b.is_ascii_digit()))
    });
    let counted = (1..=count).contains(&number) && !is_ranks;
    counted.then(|| (Series { stem: stem.to_owned(), count }, number))
}

/// A shard that an index forgets: its number is among those that the names of the index's files count, as in
/// `model-00001-of-00003.safetensors`, the index names no file of that number, and fewer files than they count: a
/// shard may have another name. Writers give numbers to files with tensors alone, so its tensors are lost. The files
/// are of safetensors or `.bin`.
#[must_use]
pub fn forgotten_shard<'a>(files: impl IntoIterator<Item = &'a str>) -> Option<String> {
    let mut all: BTreeMap<(Series, &str), BTreeSet<u32>> = BTreeMap::new();
    let files: BTreeSet<&str> = files.into_iter().collect();
    for file in files.iter().copied() {
        let ending = file.rfind('.').map_or("", |dot| &file[dot..]);
        if let Some((series, number)) = file.strip_suffix(ending).and_then(series_of) {
            all.entry((series, ending)).or_default().insert(number);
        }
    }
    all.into_iter().find_map(|((Series { stem, count }, ending), named)| {
        let is_fewer = files.len() < count as usize;
        let number = (1..=count).find(|number| is_fewer && !named.contains(number))?;
        Some(format!("{stem}-{number:05}-of-{count:05}{ending}"))
    })
}

/// The number and count in `…-00001-of-00002.safetensors`.
fn numbered(name: &str) -> Option<(u64, u64)> {
    let (rest, count) = name.strip_suffix(ENDING)?.rsplit_once("-of-")?;
    let (_, number) = rest.rsplit_once('-')?;
    Some((number.parse().ok()?, count.parse().ok()?))
}

/// Evidence that a writer died while it replaced a model: the configuration is still set aside.
pub(super) async fn replacement(
    storage: &dyn Storage,
    folder: &str,
) -> Result<Option<Finding>, CheckpointError> {
    let key = |name: &str| Key::new(format!("{folder}{name}")).map_err(StorageError::from);
    let (config, aside) = (key(CONFIG_NAME)?, key(CONFIG_ASIDE)?);
    let is_aside = match storage.contains(&aside).await {
        // A writer sets aside a file. A link that is not followed is the user's.
        Err(error) if error.kind() == StorageErrorKind::Link => false,
        is_aside => is_aside?,
    };
    if !is_aside || storage.contains(&config).await? {
        return Ok(None);
    }
    let message = format!(
        "the model was being replaced when its writer died: its configuration is gone, and that of \
         the model before is in {CONFIG_ASIDE}; write the model again with overwriting on, or put \
         the configuration of these weights into {CONFIG_NAME}"
    );
    Ok(Some(Finding::new(FindingKind::Unfinished, message).within(&config)))
}

/// Evidence that the writer of files without an index died.
pub(super) async fn unfinished(
    storage: &dyn Storage,
    folder: &str,
) -> Result<Option<Finding>, CheckpointError> {
    let key = Key::new(format!("{folder}{UNFINISHED_NAME}")).map_err(StorageError::from)?;
    if !storage.contains(&key).await? {
        return Ok(None);
    }
    let message = format!(
        "there is a {UNFINISHED_NAME}, and no index: the model was not written to its end; write \
         it again with overwriting on"
    );
    Ok(Some(Finding::new(FindingKind::Unfinished, message).within(&key)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn look(names: &[&str]) -> Names {
        Names::look(names.iter().map(|name| Key::new(name).unwrap()).collect())
    }

    #[test]
    fn names_promise_the_others_and_an_index() {
        let whole = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
        let found = look(&whole).findings;
        let [index] = &*found else { panic!("{found:?}") };
        assert_eq!(index.kind, FindingKind::MissingIndex);
        assert_eq!(index.file.as_ref().unwrap().as_str(), "model.safetensors.index.json");
        let found = look(&["sub/model-g3-00002-of-00003.safetensors"]).findings;
        let files: Vec<_> = found.iter().map(|f| f.file.as_ref().unwrap().as_str()).collect();
        let expected = [
            "sub/model-g3-00001-of-00003.safetensors",
            "sub/model-g3-00003-of-00003.safetensors",
            "sub/model.safetensors.index.json",
        ];
        assert_eq!(files, expected);
        let huge = look(&["model-00001-of-4294967295.safetensors"]).findings;
        assert_eq!(huge.len(), NAMED_MAX + 1);
    }

    #[test]
    fn an_index_names_every_number_that_its_names_count() {
        for (files, forgotten) in [
            (&["m-00001-of-00002.safetensors", "m-00002-of-00002.safetensors"][..], None),
            (&["m-00001-of-00002.bin"], Some("m-00002-of-00002.bin")),
            (&["a/m.fp16-00002-of-00002.safetensors"], Some("a/m.fp16-00001-of-00002.safetensors")),
            (
                &["m-00001-of-00001.safetensors", "n-00001-of-00003.bin"],
                Some("n-00002-of-00003.bin"),
            ),
            (&["m.safetensors", "shard-00001-m-00001-of-00002.safetensors", "é", "-of-"], None),
            (&["m-00001-of-00002.safetensors", "blob"], None),
            (&["m-00001-of-4294967295.bin"], Some("m-00002-of-4294967295.bin")),
        ] {
            assert_eq!(forgotten_shard(files.iter().copied()).as_deref(), forgotten, "{files:?}");
        }
    }

    #[test]
    fn what_a_rank_holds_has_no_index() {
        let shard = "shard-00007-model-00001-of-00001.safetensors";
        let found = look(&[shard, "other.safetensors", "-of-.safetensors"]);
        assert!(found.findings.is_empty() && found.notes.is_empty(), "{found:?}");
        let found = look(&["shard-00007-model-00001-of-00002.safetensors"]);
        assert!(found.findings.is_empty(), "{found:?}");
        assert!(found.notes[0].contains("count 2 of them, there are 1"), "{found:?}");
    }

    #[test]
    fn a_single_file_is_the_model_whatever_was_begun_beside_it() {
        let found =
            look(&["model.safetensors", "model-00001-of-00002.safetensors", "x.safetensors"]);
        assert!(found.findings.is_empty(), "{found:?}");
        let keys: Vec<_> = found.keys.iter().map(Key::as_str).collect();
        assert_eq!(keys, ["model.safetensors", "x.safetensors"]);
        assert!(found.notes[0].contains("not written to its end"), "{found:?}");
    }
}

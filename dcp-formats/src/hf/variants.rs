//! Variants of a model: `model.fp16.safetensors` next to `model.safetensors`, as transformers and
//! diffusers name them.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use dcp_core::{CheckpointError, FormatError, Key, Storage};

use super::ENDING;
use super::load::{Target, names};

/// The infix between the names of a model and of a variant's index.
const INDEX: &str = ".safetensors.index.";

/// A file name without its ending and shard number, and the variant.
fn parts(name: &str) -> Option<(&str, &str)> {
    let stem = name.strip_suffix(ENDING)?;
    let shard = stem.rsplit_once("-of-").and_then(|(front, of)| {
        let (base, number) = front.rsplit_once('-')?;
        let digits = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
        (digits(of) && digits(number)).then_some(base)
    });
    let base = shard.unwrap_or(stem);
    Some((base, &stem[base.len()..]))
}

/// The parts of the name of an index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct IndexName<'a> {
    /// The beginning of the names of the files: `model`, `diffusion_pytorch_model`.
    pub(super) model: &'a str,
    /// The variant: `fp16` of `model.safetensors.index.fp16.json`.
    pub(super) variant: Option<&'a str>,
}

impl<'a> IndexName<'a> {
    /// The parts of the name of an index; `None` for a file of another name. Diffusers up to 0.31 put the
    /// variant of an index elsewhere: `model.safetensors.fp16.index.json`.
    pub(super) fn parse(name: &'a str) -> Option<Self> {
        let (model, rest) = name.rsplit_once(ENDING)?;
        let rest = rest.strip_suffix(".json")?;
        let variant = match rest.strip_prefix(".index") {
            Some("") => None,
            Some(variant) => Some(variant.strip_prefix('.')?),
            None => Some(rest.strip_suffix(".index")?.strip_prefix('.')?),
        };
        let is_plain = |variant: &str| !variant.is_empty() && !variant.contains('.');
        (!model.is_empty() && variant.is_none_or(is_plain)).then_some(Self { model, variant })
    }

    /// The name of the model in one file, which loaders prefer to this index.
    pub(super) fn single(&self) -> String {
        match self.variant {
            Some(variant) => format!("{}.{variant}{ENDING}", self.model),
            None => format!("{}{ENDING}", self.model),
        }
    }
}

impl fmt::Display for IndexName<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{ENDING}.index", self.model)?;
        self.variant.map_or(Ok(()), |variant| write!(f, ".{variant}"))?;
        f.write_str(".json")
    }
}

/// The variant whose index a file is: `fp16` of `model.safetensors.index.fp16.json`.
pub(super) fn variant_of_index(key: &Key) -> Option<&str> {
    IndexName::parse(key.file_name())?.variant
}

/// Whether a file has tensors of this variant: `model.fp16-00001-of-00002.safetensors`.
pub(super) fn has_variant(key: &Key, variant: Option<&str>) -> bool {
    let base = parts(key.file_name()).and_then(|(base, _)| base.rsplit_once('.'));
    variant.is_some() && base.map(|(_, of)| of) == variant
}

/// Separates the files of a folder from those that are variants of others. Of a model that has no main
/// files, the first variant is the model.
pub(super) fn without_variants(keys: Vec<Key>) -> (Vec<Key>, Vec<Key>) {
    let bases: BTreeSet<String> =
        keys.iter().filter_map(|key| Some(parts(key.as_str())?.0.to_owned())).collect();
    let variant = |key: &Key| {
        let (main, variant) = parts(key.as_str())?.0.rsplit_once('.')?;
        Some((main.to_owned(), variant.to_owned()))
    };
    let mut first: BTreeMap<String, String> = BTreeMap::new();
    for (main, variant) in keys.iter().filter_map(variant) {
        let known = first.entry(main).or_insert_with(|| variant.clone());
        *known = variant.min(known.clone());
    }
    keys.into_iter().partition(|key| {
        variant(key).is_none_or(|(main, variant)| {
            !bases.contains(&main) && first.get(&main) == Some(&variant)
        })
    })
}

/// The files of the variant `variant` of the model in `folder`: those of its index, or its single
/// file.
///
/// # Errors
///
/// When there is no such variant, or several models have one; when the storage fails.
pub(super) async fn target_of(
    storage: &dyn Storage,
    folder: Option<&Key>,
    variant: &str,
) -> Result<Target, CheckpointError> {
    let names = names(storage, folder, true).await?.unwrap_or_default();
    let index = |key: &&Key| variant_of_index(key) == Some(variant);
    let file = |key: &&Key| {
        let is_whole = parts(key.file_name()).is_some_and(|(_, number)| number.is_empty());
        is_whole && has_variant(key, Some(variant))
    };
    let indexes: Vec<_> =
        names.iter().filter(index).map(|key| Target::Index(key.clone())).collect();
    let files = names.iter().filter(file).map(|key| Target::File(key.clone()));
    let mut found = if indexes.is_empty() { files.collect() } else { indexes };
    match (found.pop(), found.is_empty()) {
        (Some(one), true) => Ok(one),
        (Some(_), false) => {
            let problem =
                format!("several models have a variant {variant:?}: read one by its file");
            Err(FormatError::new("safetensors folder", problem).into())
        }
        (None, _) => {
            let message = format!(
                "there is no variant {variant:?}: neither an index NAME{INDEX}{variant}.json nor a \
                 file NAME.{variant}{ENDING}"
            );
            Err(CheckpointError::NotACheckpoint { message })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_index_is_known_by_its_name() {
        let parse = |name| IndexName::parse(name).map(|found| (found.model, found.variant));
        for (name, found) in [
            ("model.safetensors.index.json", Some(("model", None))),
            ("model.safetensors.index.fp16.json", Some(("model", Some("fp16")))),
            ("unet.safetensors.fp16.index.json", Some(("unet", Some("fp16")))),
            ("consolidated.v2.safetensors.index.json", Some(("consolidated.v2", None))),
            ("model.safetensors.index.a.b.json", None),
            ("model.safetensors.index..json", None),
            ("model.safetensors.json", None),
            ("model.safetensors", None),
            (".safetensors.index.json", None),
        ] {
            assert_eq!(parse(name), found, "{name}");
        }
    }

    #[test]
    fn variants_of_files_that_are_there_are_left_out() {
        let kept = |names: &[&str]| {
            let keys = names.iter().map(|name| Key::new(*name).unwrap()).collect();
            let (kept, variants) = without_variants(keys);
            assert_eq!(kept.len() + variants.len(), names.len());
            kept.iter().map(Key::to_string).collect::<Vec<_>>()
        };
        assert_eq!(kept(&["model.fp16.safetensors", "model.safetensors"]), ["model.safetensors"]);
        let shards = ["model-00001-of-00001.safetensors", "model.bf16-00001-of-00002.safetensors"];
        assert_eq!(kept(&shards), shards[..1]);
        assert_eq!(kept(&["model.bf16.safetensors", "model.fp16.safetensors"]).len(), 1);
        for alone in
            [&["model.fp16.safetensors"][..], &["a.safetensors", "b.c.safetensors"], &shards[1..]]
        {
            assert_eq!(kept(alone), alone);
        }
    }
}

//! Selects and renames keys.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use dcp_core::CheckpointMetadata;
use dcp_core::path::{PathItem, StatePath};
use dcp_core::text::{Quoted, beginning};
use dcp_formats::UniqueMap;
use dcp_planner::KeyFilter;
use indexmap::IndexMap;

use crate::error::JobError;
use crate::keys::part::{Parts, below, may_have_weights};
use crate::keys::rename::{NAME_BYTES_MAX, Rename};
use crate::keys::unmatched::{UnmatchedPattern, unmatched_patterns};

/// A selection of keys, with new names. Keys are selected by their names in the checkpoint; then
/// the mapping renames them, and after it each substitution in order.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Selection {
    /// The keys to include; all by default.
    pub include: KeyFilter,
    /// The keys to exclude from those; none when `None`.
    pub exclude: Option<KeyFilter>,
    /// The part of a training state to include.
    pub part: StatePart,
    /// New names by old ones; `None` drops a key. Every old name must exist in the checkpoint.
    pub mapping: IndexMap<String, Option<String>>,
    /// Substitutions in names.
    pub renames: Vec<Rename>,
}

/// A part of a training state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum StatePart {
    /// All keys.
    #[default]
    Everything,
    /// All keys but the optimizer's: those below `optim`, `optimizer`, `optimizer_states`,
    /// `opt_state` and similar names, below Megatron-Core's `chained_<n>.optimizer`, and in any
    /// dict of `state` and `param_groups`, such as `app.optim`, `opt_g` or the root.
    WithoutOptimizer,
    /// The model alone, under the names of its own code. If the state dict has a `model` (or
    /// `model_state_dict`, `state_dict`, `module`) at its root or below, as in `app.model`: the
    /// contents of that dict, without its prefix. Otherwise all keys but the optimizer's and what a
    /// trainer keeps next to a model, such as `train_state`, `lr_scheduler` or `ema`.
    Model,
}

impl Selection {
    /// Selects everything, under its own name.
    #[must_use]
    pub fn all() -> Self {
        Self::default()
    }

    /// Sets the filter of the keys to include.
    #[must_use]
    pub fn with_include(mut self, filter: KeyFilter) -> Self {
        self.include = filter;
        self
    }

    /// Sets the filter of the keys to exclude.
    #[must_use]
    pub fn with_exclude(mut self, filter: KeyFilter) -> Self {
        self.exclude = Some(filter);
        self
    }

    /// Selects one part of a training state.
    #[must_use]
    pub fn with_part(mut self, part: StatePart) -> Self {
        self.part = part;
        self
    }

    /// Sets the mapping of names.
    #[must_use]
    pub fn with_mapping(mut self, mapping: IndexMap<String, Option<String>>) -> Self {
        self.mapping = mapping;
        self
    }

    /// Appends a substitution.
    #[must_use]
    pub fn with_rename(mut self, rename: Rename) -> Self {
        self.renames.push(rename);
        self
    }

    /// Whether the selection keeps every key under its own name.
    #[must_use]
    pub fn is_everything(&self) -> bool {
        self.include == KeyFilter::all()
            && self.exclude.is_none()
            && self.part == StatePart::Everything
            && self.mapping.is_empty()
            && self.renames.is_empty()
    }

    /// The selected keys of a checkpoint, in its order.
    ///
    /// # Errors
    ///
    /// When the mapping names keys that do not exist, or two keys get one name; the error lists all
    /// of them. When a part is selected that cannot be identified, or that several keys may be.
    pub fn of(&self, metadata: &CheckpointMetadata) -> Result<Vec<Chosen>, JobError> {
        let unknown: Vec<&str> =
            self.mapping.keys().map(String::as_str).filter(|k| metadata.get(k).is_none()).collect();
        if !unknown.is_empty() {
            let problem = format!("maps names that are not in the checkpoint: {}", list(&unknown));
            return Err(JobError::invalid_option("the mapping", problem));
        }
        let parts = match self.part {
            StatePart::Everything => None,
            _ => Some(Parts::of(metadata)),
        };
        let model_root = match (self.part, &parts) {
            (StatePart::Model, Some(parts)) => self.model_root(parts, metadata)?,
            _ => None,
        };
        let mut chosen = Vec::new();
        let mut suspicious: Vec<&str> = Vec::new();
        for (entry, (fqn, value)) in metadata.iter().enumerate() {
            let path = value.path();
            if !self.selects(fqn, path) {
                continue;
            }
            let in_part = match (model_root, &parts) {
                (Some(model), _) => below(model, fqn).is_some(),
                (None, Some(parts)) if self.part == StatePart::Model => parts.is_model(fqn, value),
                (None, Some(parts)) => !parts.is_optimizer(fqn),
                (None, None) => true,
            };
            if !in_part {
                continue;
            }
            if parts.is_some() && Parts::suspicious(fqn, value) {
                suspicious.push(fqn);
            }
            let inner = model_root.and_then(|root| below(root, fqn));
            let Some(name) = self.name(fqn, inner.unwrap_or(fqn))? else { continue };
            let path = if name == *fqn { path.cloned() } else { renamed_path(path, &name) };
            chosen.push(Chosen { entry, fqn: name, path });
        }
        if !suspicious.is_empty() {
            let problem = format!(
                "{} look like the state of an optimizer, but nothing says what belongs to it",
                list(&suspicious)
            );
            return Err(JobError::UnknownPart { problem });
        }
        let by_name = Self { part: StatePart::Everything, ..self.clone() };
        if parts.is_some_and(|parts| parts.are_unknown()) && by_name.is_everything() {
            let roots: BTreeSet<&str> =
                metadata.iter().map(|(fqn, entry)| root(fqn, entry.path())).collect();
            let roots: Vec<&str> = roots.into_iter().collect();
            let problem =
                format!("nothing says which of {} is the model, or an optimizer", list(&roots));
            return Err(JobError::UnknownPart { problem });
        }
        refuse_clashes(metadata, &chosen)?;
        Ok(chosen)
    }

    /// The patterns that match no key, in the order in which they apply: filters that match no key,
    /// and substitutions that match no name of a selected key.
    ///
    /// # Errors
    ///
    /// As [`of`](Self::of).
    pub fn unmatched(
        &self,
        metadata: &CheckpointMetadata,
    ) -> Result<Vec<UnmatchedPattern>, JobError> {
        let mut unmatched = self.unmatched_filters(metadata);
        if self.renames.is_empty() {
            return Ok(unmatched);
        }
        let chosen = Self { renames: Vec::new(), ..self.clone() }.of(metadata)?;
        let mut names: Vec<_> = chosen.into_iter().map(|one| one.fqn).collect();
        for rename in &self.renames {
            if !names.iter().any(|name| rename.is_match(name)) {
                unmatched.push(rename.unmatched(&names));
            }
            let renamed = names.iter().map(|name| rename.apply(name));
            // `of` refuses longer ones.
            names = renamed.take_while(|name| name.len() <= NAME_BYTES_MAX).collect();
        }
        Ok(unmatched)
    }

    /// The include and exclude patterns that match no key.
    pub(crate) fn unmatched_filters(&self, metadata: &CheckpointMetadata) -> Vec<UnmatchedPattern> {
        let keys: Vec<_> = metadata.iter().map(|(fqn, entry)| (&**fqn, entry.path())).collect();
        let mut unmatched = unmatched_patterns("include", self.include.patterns(), &keys);
        if let Some(exclude) = &self.exclude {
            unmatched.extend(unmatched_patterns("exclude", exclude.patterns(), &keys));
        }
        unmatched
    }

    /// The new name of a key whose name below the selected root is `inner`; `None` when the
    /// selection drops it.
    pub(crate) fn name(&self, fqn: &str, inner: &str) -> Result<Option<Arc<str>>, JobError> {
        let mut name: Arc<str> = match self.mapping.get(fqn) {
            Some(None) => return Ok(None),
            Some(Some(new)) => new.as_str().into(),
            None => inner.into(),
        };
        for rename in &self.renames {
            name = rename.apply(&name);
            if name.len() > NAME_BYTES_MAX {
                let problem = format!(
                    "gives {} a name of more than {NAME_BYTES_MAX} bytes",
                    Quoted(beginning(fqn, 200))
                );
                return Err(JobError::invalid_option("a substitution", problem));
            }
        }
        Ok(Some(name))
    }

    /// Whether the filters take a key.
    fn selects(&self, fqn: &str, path: Option<&StatePath>) -> bool {
        self.include.selects(fqn, path)
            && !self.exclude.as_ref().is_some_and(|filter| filter.selects(fqn, path))
    }

    /// The prefix of the model, among the keys that the filters take.
    fn model_root<'a>(
        &self,
        parts: &'a Parts,
        metadata: &CheckpointMetadata,
    ) -> Result<Option<&'a str>, JobError> {
        let selected = metadata.iter().filter(|(fqn, entry)| self.selects(fqn, entry.path()));
        parts.model(selected.map(|(fqn, _)| &**fqn)).map_err(|candidates| {
            let names: Vec<_> = candidates.iter().map(|name| format!("{name:?}")).collect();
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            let problem = format!(
                "each of {} may be the model; `StatePart::Model` with `Keys::include` takes one of them",
                list(&names)
            );
            JobError::UnknownPart { problem }
        })
    }

    /// Refuses a selection that takes no key of a checkpoint, or of a model nothing that may have
    /// weights. The keys of the checkpoint are `names`; `chosen` are positions in `metadata`.
    pub(crate) fn refuse_nothing(
        &self,
        names: &CheckpointMetadata,
        chosen: &[Chosen],
        metadata: &CheckpointMetadata,
    ) -> Result<(), JobError> {
        let of = if chosen.is_empty() && !names.is_empty() {
            "the checkpoint"
        } else if self.lacks_weights(names, chosen, metadata) {
            "the weights of the checkpoint"
        } else {
            return Ok(());
        };
        let unmatched = self.unmatched_filters(names);
        Err(JobError::NothingSelected { of: of.to_owned(), unmatched })
    }

    /// Whether a model is selected of a checkpoint with tensors, and nothing that may have weights.
    fn lacks_weights(
        &self,
        names: &CheckpointMetadata,
        chosen: &[Chosen],
        metadata: &CheckpointMetadata,
    ) -> bool {
        let has_weights = |one: &Chosen| {
            metadata.at(one.entry).is_some_and(|(fqn, entry)| may_have_weights(fqn, entry))
        };
        self.part == StatePart::Model
            && !chosen.iter().any(has_weights)
            && names.iter().any(|(_, entry)| entry.as_tensor().is_some())
    }
}

/// A selected key.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Chosen {
    /// Its position in the checkpoint.
    pub entry: usize,
    /// Its new name.
    pub fqn: Arc<str>,
    /// Its path in the nested state dict, if it still has one.
    pub path: Option<StatePath>,
}

/// The first step to a value.
fn root<'a>(fqn: &'a str, path: Option<&'a StatePath>) -> &'a str {
    match path.and_then(|path| path.first()) {
        Some(PathItem::Key(key)) => key,
        _ => fqn.split('.').next().unwrap_or(fqn),
    }
}

/// The path of a renamed key. The steps before and after the part of the name that changes remain, so
/// that the key stays in its dict, unless the dict itself gets another name.
fn renamed_path(path: Option<&StatePath>, name: &str) -> Option<StatePath> {
    let path = path?;
    let is_key = |step: Option<&PathItem>| matches!(step, Some(PathItem::Key(_)));
    let lost = (1..path.len()).map(|from| &path[from..]);
    let mut lost = lost.filter(|rest| is_key(rest.first()));
    if let Some(rest) = lost.find(|rest| PathItem::flat_name(rest) == name) {
        return Some(rest.into());
    }
    let before =
        |len: &usize| name.strip_prefix(&PathItem::flat_name(&path[..*len]))?.strip_prefix('.');
    let kept = (1..path.len()).rev().find_map(|len| Some((len, before(&len)?)));
    let (kept, middle) = kept.unwrap_or((0, name));
    let after =
        |from: &usize| middle.strip_suffix(&PathItem::flat_name(&path[*from..]))?.strip_suffix('.');
    let tail = (kept + 1..path.len()).find_map(|from| Some((from, after(&from)?)));
    let (tail, middle) = tail.unwrap_or((path.len(), middle));
    let replaced = &path[kept..tail];
    let plain =
        replaced.iter().all(|step| matches!(step, PathItem::Key(key) if !key.contains('.')));
    let middle: Vec<PathItem> = match plain && middle.split('.').count() == replaced.len() {
        true => middle.split('.').map(|step| PathItem::Key(step.into())).collect(),
        false => vec![PathItem::Key(middle.into())],
    };
    Some(path[..kept].iter().cloned().chain(middle).chain(path[tail..].iter().cloned()).collect())
}

fn refuse_clashes(metadata: &CheckpointMetadata, chosen: &[Chosen]) -> Result<(), JobError> {
    let mut by_name: HashMap<&str, usize> = HashMap::with_capacity(chosen.len());
    let mut clashes = Vec::new();
    for one in chosen {
        if let Some(other) = by_name.insert(&one.fqn, one.entry) {
            let old = |entry| metadata.at(entry).map_or("", |(fqn, _)| fqn);
            clashes.push(format!("{:?} and {:?} as {:?}", old(other), old(one.entry), one.fqn));
        }
    }
    if clashes.is_empty() {
        return Ok(());
    }
    let clashes: Vec<&str> = clashes.iter().map(String::as_str).collect();
    let problem = format!("would give keys the same name: {}", list(&clashes));
    Err(JobError::invalid_option("the renaming", problem))
}

/// The first items of a list, and the number of the others.
pub(crate) fn list(all: &[&str]) -> String {
    const SHOWN: usize = 8;
    let mut text = all.iter().take(SHOWN).copied().collect::<Vec<_>>().join(", ");
    if all.len() > SHOWN {
        text.push_str(&format!(", and {} more", all.len() - SHOWN));
    }
    text
}

/// Parses a mapping of names: a JSON object, or lines of an old and a new name separated by white
/// space. `null`, or `-` in a line, drops a key. Empty lines and lines that begin with `#` are
/// ignored.
///
/// # Errors
///
/// When the text is neither, or maps a name twice.
pub fn parse_mapping(text: &str) -> Result<IndexMap<String, Option<String>>, JobError> {
    let bad = |problem: String| JobError::invalid_option("the mapping", problem);
    if text.trim_start().starts_with('{') {
        let names: Result<UniqueMap<Option<String>>, _> = serde_json::from_str(text);
        return names
            .map(|names| names.0)
            .map_err(|error| bad(format!("is no JSON object of names: {error}")));
    }
    let mut mapping = IndexMap::new();
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let mut names = line.split_whitespace();
        let (Some(old), Some(new), None) = (names.next(), names.next(), names.next()) else {
            return Err(bad(format!("has something else than two names in line {number}")));
        };
        let new = (new != "-").then(|| new.to_owned());
        if mapping.insert(old.to_owned(), new).is_some() {
            return Err(bad(format!("maps {old:?} a second time in line {number}")));
        }
    }
    Ok(mapping)
}

#[cfg(test)]
mod tests {
    use dcp_core::DType;
    use dcp_core::metadata::{Entry, TensorEntry};

    use super::*;

    fn metadata(keys: &[&[&str]]) -> CheckpointMetadata {
        let mut metadata = CheckpointMetadata::new();
        for path in keys {
            let mut tensor = TensorEntry::new(DType::Float32, [2]);
            let steps = path.iter().map(|step| PathItem::Key((*step).into()));
            tensor.path = Some(steps.collect());
            metadata.insert(path.join("."), Entry::Tensor(tensor));
        }
        metadata
    }

    fn names(selection: &Selection, metadata: &CheckpointMetadata) -> Vec<String> {
        let chosen = selection.of(metadata).unwrap();
        chosen.iter().map(|one| one.fqn.to_string()).collect()
    }

    #[test]
    fn the_model_is_found_by_nesting_and_not_by_name() {
        let state = metadata(&[&["model", "model.w"], &["optim", "state.w"], &["step"]]);
        let model = Selection::all().with_part(StatePart::Model);
        assert_eq!(names(&model, &state), ["model.w"]);
        let without = Selection::all().with_part(StatePart::WithoutOptimizer);
        assert_eq!(names(&without, &state), ["model.model.w", "step"]);
        // A model whose own names begin with `model.`, such as Llama.
        let llama = metadata(&[&["model.embed.weight"], &["lm_head.weight"]]);
        assert_eq!(names(&model, &llama), ["model.embed.weight", "lm_head.weight"]);
    }

    #[test]
    fn paths_follow_names() {
        let state = metadata(&[&["model", "a", "b.c"]]);
        let path = |rename: &str| {
            let selection = Selection::all().with_rename(Rename::parse(rename).unwrap());
            let chosen = selection.of(&state).unwrap();
            chosen.first().unwrap().path.clone().unwrap().to_vec()
        };
        let key = |key: &str| PathItem::Key(key.into());
        assert_eq!(path("s/^model.//"), [key("a"), key("b.c")]);
        assert_eq!(path("s/x/y/"), [key("model"), key("a"), key("b.c")]);
        // A key stays in its dict.
        assert_eq!(path("s/a/z/"), [key("model"), key("z"), key("b.c")]);
        assert_eq!(path("s/b.c/d/"), [key("model"), key("a"), key("d")]);
        assert_eq!(path("s/c$/d/"), [key("model"), key("a"), key("b.d")]);
        assert_eq!(path("s/^model.a/x.y/"), [key("x"), key("y"), key("b.c")]);
        assert_eq!(path("s/^model.a/x/"), [key("x"), key("b.c")]);
        assert_eq!(path("s/.*/x/"), [key("x")]);
    }

    #[test]
    fn clashes_and_unknown_names_are_listed() {
        let state = metadata(&[&["a", "w"], &["b", "w"], &["c"]]);
        let clash = Selection::all().with_rename(Rename::parse("s/^[ab].//").unwrap());
        let error = clash.of(&state).unwrap_err().to_string();
        assert!(error.contains(r#""a.w" and "b.w" as "w""#), "{error}");
        let mapping = parse_mapping("# names\nc d\nx y\n").unwrap();
        let error = Selection::all().with_mapping(mapping).of(&state).unwrap_err().to_string();
        assert!(error.ends_with("not in the checkpoint: x"), "{error}");
    }

    #[test]
    fn mappings_are_json_or_lines() {
        let json = parse_mapping(r#"{"c": "d", "a.w": null}"#).unwrap();
        assert_eq!(json, parse_mapping("c d\na.w\t-\n").unwrap());
        let state = metadata(&[&["a", "w"], &["b", "w"], &["c"]]);
        assert_eq!(names(&Selection::all().with_mapping(json), &state), ["b.w", "d"]);
        assert!(parse_mapping("a").is_err() && parse_mapping("a b\na c").is_err());
        assert!(parse_mapping(r#"{"a": 1}"#).is_err());
        let twice = parse_mapping(r#"{"a": "b", "a": "c"}"#).unwrap_err().to_string();
        assert!(twice.contains(r#""a" occurs twice"#), "{twice}");
    }
}

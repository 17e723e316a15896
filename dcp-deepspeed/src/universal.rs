//! The parameters of a universal folder: a folder for each, with a file for each value of it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use dcp_core::{CheckpointError, Dims};
use indexmap::IndexMap;

use crate::error::bad;
use crate::file_name::{FP32, UNIVERSAL};
use crate::flat::Run;
use crate::model_states::{ModelStates, Shapes};
use crate::parameter::{Masters, Parameter, State};
use crate::rank_file::{RankFile, as_strs};

/// The files of a parameter: by the name of the value, the position of the file.
pub(crate) type ValueFiles = BTreeMap<String, usize>;

/// Finds every parameter. Those that were not trained have no state of an optimizer, and are in the model states in
/// their own dtype; ds_to_universal rounds tied ones and turns integers into floats.
pub(crate) fn masters(
    folders: &BTreeMap<String, ValueFiles>,
    models: &[ModelStates],
    files: &[RankFile],
) -> Result<Masters, CheckpointError> {
    let mut shapes = Shapes::new();
    for (name, shape) in models.iter().flat_map(ModelStates::trained) {
        shapes.entry(Arc::clone(name)).or_insert_with(|| shape.clone());
    }
    let mut found = Masters::default();
    let trained = |name: &str, of: &ValueFiles| shapes.contains_key(name) || of.len() > 1;
    let known: BTreeSet<&String> = folders
        .iter()
        .filter(|(name, of)| trained(name, of))
        .flat_map(|(_, of)| of.keys())
        .collect();
    let lacks = |name: &str, key: &str| {
        let folder = format!("{UNIVERSAL}/{name}");
        bad(format!(
            "{folder}/{key} is missing: the conversion to a universal checkpoint did not finish, or not all of it is here"
        ))
    };
    for name in shapes.keys() {
        if !folders.contains_key(&**name) {
            return Err(lacks(name, FP32));
        }
    }
    // In the order of the buffers, then those that no buffer has.
    let others = folders.keys().filter(|name| !shapes.contains_key(name.as_str()));
    let names: Vec<Arc<str>> =
        shapes.keys().cloned().chain(others.map(|name| Arc::from(name.as_str()))).collect();
    for name in names {
        let Some(of) = folders.get(&*name).filter(|of| trained(&name, of)) else { continue };
        if let Some(key) = known.iter().find(|key| !of.contains_key(key.as_str())) {
            return Err(lacks(&name, key));
        }
        let fp32 = of.get(FP32).ok_or_else(|| lacks(&name, FP32))?;
        let shape = match shapes.get(&name) {
            Some(shape) => shape.clone(),
            None => tensor_of(files, *fp32)?.1.clone(),
        };
        let mut states = IndexMap::new();
        for (file, part) in of.iter().filter(|(file, _)| *file != FP32) {
            let key = file.strip_suffix(".pt").unwrap_or(file);
            states.insert(Arc::from(key), state(files, *part, &shape, &name)?);
        }
        let weights = state(files, *fp32, &shape, &name)?;
        found.parameters.insert(name, Parameter { shape, weights, states });
    }
    for groups in models.iter().filter_map(|model| model.groups.as_ref()).take(1) {
        let names = groups.iter().map(|shapes| shapes.keys().cloned().collect());
        found.groups.names = names.collect();
    }
    Ok(found)
}

/// The tensor that a file holds: alone, or beside what DeepSpeed needs to divide it.
fn tensor_of(files: &[RankFile], part: usize) -> Result<(usize, &Dims), CheckpointError> {
    let file = files.get(part).ok_or_else(|| bad("a file was not opened"))?;
    let found = file.entries().find_map(|(at, steps, entry)| {
        let tensor = entry.as_tensor()?;
        matches!(&*as_strs(&steps), ["param" | "value"]).then_some((at, &tensor.shape))
    });
    found.ok_or_else(|| crate::error::bad_file(&file.name, "it holds no tensor"))
}

fn state(
    files: &[RankFile],
    part: usize,
    shape: &Dims,
    name: &str,
) -> Result<State, CheckpointError> {
    let (entry, stored) = tensor_of(files, part)?;
    if stored == shape || stored.ndim() == 0 {
        return Ok(State::Entry { part, entry });
    }
    let numel = shape.checked_volume();
    match numel.filter(|numel| **stored == [*numel]) {
        Some(numel) => Ok(State::Elements(vec![Run { part, entry, range: 0..numel }])),
        None => {
            let file = files.get(part).map_or("", |file| &file.name);
            let problem = format!("it has the shape {stored}, and {name:?} has {shape}");
            Err(crate::error::bad_file(file, problem))
        }
    }
}

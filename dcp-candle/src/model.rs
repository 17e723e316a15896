//! A `VarMap` as a model whose state dict is saved.

use std::collections::BTreeMap;
use std::hash::{Hash, Hasher};

use candle_core::Var;
use candle_nn::VarMap;
use dcp_core::{CheckpointError, Dims, Region, Tensor, Value};
use dcp_state::{HiddenModule, Model, ModelEntry, ParamId};

use crate::error::CandleError;
use crate::tensor::{from_candle, shard_from_candle, to_candle};

/// The variables of a [`VarMap`], by their names there.
///
/// A save reads the variables' memory and a load writes it, without a copy of the model. The model
/// has the variables that the map has when this is made.
#[derive(Debug)]
pub struct VarMapModel {
    variables: BTreeMap<String, Variable>,
}

#[derive(Clone, Debug)]
pub(crate) struct Variable {
    pub(crate) var: Var,
    pub(crate) placement: Option<Placement>,
    buffer: bool,
    frozen: bool,
}

/// The part of a tensor that a variable is.
#[derive(Clone, Debug)]
pub(crate) struct Placement {
    shape: Dims,
    region: Region,
}

impl VarMapModel {
    /// All variables of `vars`: parameters that are trained, whole on every rank.
    #[must_use]
    pub fn new(vars: &VarMap) -> Self {
        // A panic of another thread leaves whole variables in the map.
        let vars = vars.data().lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let variable = |var: &Var| Variable {
            var: var.clone(),
            placement: None,
            buffer: false,
            frozen: false,
        };
        let variables = vars.iter().map(|(name, var)| (name.clone(), variable(var))).collect();
        Self { variables }
    }

    /// Declares that a variable is the elements in `region` of a tensor of `shape`.
    ///
    /// # Errors
    ///
    /// [`CandleError::UnknownVariable`], and [`CandleError::Tensor`] when the region has another size
    /// than the variable or is outside `shape`.
    pub fn shard(
        mut self,
        name: &str,
        shape: impl Into<Dims>,
        region: Region,
    ) -> Result<Self, CandleError> {
        let variable = self.variable(name)?;
        variable.placement = Some(Placement { shape: shape.into(), region });
        variable.tensor_like(&variable.var)?;
        Ok(self)
    }

    /// Declares a variable that no optimizer trains, such as the running mean of a batch norm.
    ///
    /// # Errors
    ///
    /// [`CandleError::UnknownVariable`].
    pub fn buffer(mut self, name: &str) -> Result<Self, CandleError> {
        self.variable(name)?.buffer = true;
        Ok(self)
    }

    /// Declares a parameter that is not trained at present.
    ///
    /// # Errors
    ///
    /// [`CandleError::UnknownVariable`].
    pub fn frozen(mut self, name: &str) -> Result<Self, CandleError> {
        self.variable(name)?.frozen = true;
        Ok(self)
    }

    fn variable(&mut self, name: &str) -> Result<&mut Variable, CandleError> {
        let unknown = || CandleError::UnknownVariable { name: name.to_owned() };
        self.variables.get_mut(name).ok_or_else(unknown)
    }

    /// The variables that optimizers train, in the order of their names.
    pub(crate) fn trained(&self) -> impl Iterator<Item = &Variable> {
        let is_trained = |one: &&Variable| !one.buffer && !one.frozen && one.var.dtype().is_float();
        self.variables.values().filter(is_trained)
    }
}

impl Variable {
    /// A whole variable, of an optimizer that was made without a model.
    pub(crate) fn whole(var: Var) -> Self {
        Self { var, placement: None, buffer: false, frozen: false }
    }

    pub(crate) fn id(&self) -> ParamId {
        let mut hasher = Number(0);
        self.var.id().hash(&mut hasher);
        ParamId(hasher.0)
    }

    /// The tensor of a checkpoint that has the elements of `of` where this variable has its own.
    pub(crate) fn tensor_like(&self, of: &candle_core::Tensor) -> Result<Tensor, CandleError> {
        match &self.placement {
            None => from_candle(of),
            Some(Placement { shape, region }) => {
                shard_from_candle(of, shape.clone(), region.clone())
            }
        }
    }
}

/// The number in a `TensorId`, which has no other way out.
struct Number(u64);

impl Hasher for Number {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }

    fn write_usize(&mut self, number: usize) {
        self.0 = number as u64;
    }
}

impl Model for VarMapModel {
    fn entries(&self) -> Result<Vec<ModelEntry>, CheckpointError> {
        let entry = |(name, variable): (&String, &Variable)| {
            let tensor = variable.tensor_like(&variable.var)?;
            Ok(match variable.buffer {
                true => ModelEntry::buffer(name, tensor),
                false => {
                    let entry = ModelEntry::parameter(name, variable.id(), tensor);
                    entry.with_frozen(variable.frozen)
                }
            })
        };
        self.variables.iter().map(entry).collect()
    }

    fn hidden_modules(&self) -> Vec<HiddenModule> {
        Vec::new()
    }

    fn load(&mut self, loaded: Vec<(String, Value)>) -> Result<(), CheckpointError> {
        for (name, value) in loaded {
            let variable = self.variable(&name)?;
            if let Some(tensor) = value.as_tensor() {
                set(&variable.var, tensor)?;
            }
        }
        Ok(())
    }
}

/// Copies a loaded tensor into a variable, unless it is in the variable's memory already.
pub(crate) fn set(var: &Var, loaded: &Tensor) -> Result<(), CandleError> {
    for shard in loaded.shards() {
        let Some(view) = shard.view() else { continue };
        let host = Tensor::from_view(view.clone())?;
        var.set(&to_candle(&host, var.device())?)?;
    }
    Ok(())
}

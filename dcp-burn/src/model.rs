//! A module of burn as a model whose state dict is saved.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use burn_core::Tensor;
use burn_core::module::{Module, ModuleVisitor, Param};
use burn_store::burn_pack::Tensor as Packed;
use burn_store::{
    BurnToPyTorchAdapter, ModuleAdapter, ModuleContext, ModuleSnapshot, PyTorchToBurnAdapter,
};
use dcp_core::{CheckpointError, Value};
use dcp_state::{HiddenModule, Model, ModelEntry, ParamId};

use crate::error::BurnError;
use crate::tensor::{packed, unpacked};

/// A module of burn, with the names and layouts of PyTorch: the weight of a `Linear` is transposed,
/// and the parameters of norms are `weight` and `bias`.
///
/// burn's modules are values, which a training step consumes and returns. A clone of one shares its
/// tensors, so a program makes this of a clone to save, and takes the module out again after a load.
///
/// Parameters that require a gradient are the model's parameters, all others its buffers.
pub struct BurnModel<M> {
    module: M,
}

impl<M: Module> BurnModel<M> {
    /// All tensors of a module.
    pub fn new(module: M) -> Self {
        Self { module }
    }

    /// The module.
    pub fn module(&self) -> &M {
        &self.module
    }

    /// The module, with what was loaded.
    pub fn into_module(self) -> M {
        self.module
    }

    /// The parameters that require a gradient, in the order of the module.
    pub(crate) fn trained(&self) -> Vec<Parameter> {
        let trained = Trained::of(&self.module);
        let recorder = Recorder::default();
        let collected = self.module.collect(None, Some(Box::new(recorder.clone())), true);
        let places = recorder.0.lock().unwrap_or_else(PoisonError::into_inner);
        let parameter = |packed: Packed| {
            let id = packed.param_id.filter(|id| trained.contains(id))?;
            let containers = places.get(&id).cloned().unwrap_or_default();
            Some(Parameter { id, containers, tensor: packed })
        };
        collected.into_iter().filter_map(parameter).collect()
    }
}

/// A parameter in burn's layout.
pub(crate) struct Parameter {
    pub(crate) id: u64,
    /// The types of the modules that it is in, the innermost last.
    containers: Vec<String>,
    pub(crate) tensor: Packed,
}

impl Parameter {
    /// A tensor of the shape of the parameter, in PyTorch's layout.
    pub(crate) fn to_pytorch(&self, mut tensor: Packed) -> Packed {
        tensor.name.clone_from(&self.tensor.name);
        BurnToPyTorchAdapter.adapt(tensor, ModuleContext::new(&self.containers))
    }

    /// A tensor in PyTorch's layout, in that of the parameter.
    pub(crate) fn to_burn(&self, mut tensor: Packed) -> Packed {
        tensor.name.clone_from(&self.tensor.name);
        PyTorchToBurnAdapter.adapt(tensor, ModuleContext::new(&self.containers))
    }
}

/// The types of the modules around each parameter, which only an adapter sees.
#[derive(Clone, Default)]
struct Recorder(Arc<Mutex<HashMap<u64, Vec<String>>>>);

impl ModuleAdapter for Recorder {
    fn adapt(&self, tensor: Packed, context: ModuleContext<'_>) -> Packed {
        if let (Some(id), Some(module)) = (tensor.param_id, context.module_type()) {
            let mut places = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            places.insert(id, vec![module.to_owned()]);
        }
        tensor
    }

    fn clone_box(&self) -> Box<dyn ModuleAdapter> {
        Box::new(self.clone())
    }
}

/// The parameters that require a gradient.
struct Trained(HashSet<u64>);

impl Trained {
    fn of(module: &impl Module) -> HashSet<u64> {
        let mut trained = Self(HashSet::new());
        module.visit(&mut trained);
        trained.0
    }
}

impl ModuleVisitor for Trained {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if param.is_require_grad() {
            self.0.insert(param.id.val());
        }
    }
}

impl<M: Module> Model for BurnModel<M> {
    fn entries(&self) -> Result<Vec<ModelEntry>, CheckpointError> {
        let trained = Trained::of(&self.module);
        let collected = self.module.collect(None, Some(Box::new(BurnToPyTorchAdapter)), true);
        let entry = |packed: Packed| {
            let (name, id) = (packed.name.clone(), packed.param_id);
            let tensor = unpacked(packed)?;
            Ok(match id.filter(|id| trained.contains(id)) {
                Some(id) => ModelEntry::parameter(name, ParamId(id), tensor),
                None => ModelEntry::buffer(name, tensor),
            })
        };
        collected.into_iter().map(entry).collect()
    }

    fn hidden_modules(&self) -> Vec<HiddenModule> {
        Vec::new()
    }

    fn load(&mut self, loaded: Vec<(String, Value)>) -> Result<(), CheckpointError> {
        let mut tensors = Vec::new();
        for (name, value) in &loaded {
            if let Some(tensor) = value.as_tensor() {
                tensors.push(packed(name, None, tensor)?);
            }
        }
        let applied = self.module.apply(tensors, None, Some(Box::new(PyTorchToBurnAdapter)), true);
        match applied.errors.first() {
            Some(error) => Err(BurnError::Module { problem: error.to_string() }.into()),
            None => Ok(()),
        }
    }
}

impl<M> fmt::Debug for BurnModel<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BurnModel").finish_non_exhaustive()
    }
}

//! Names at the root of OLMo-core's state dict and of its optimizer.

pub(crate) const OPTIM: &str = "optim";
pub(crate) const MODEL: &str = "model";
pub(crate) const STATE: &str = "state";
pub(crate) const GROUPS: &str = "param_groups";
pub(crate) const PARAMS: &str = "params";

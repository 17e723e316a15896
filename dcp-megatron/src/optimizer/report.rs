//! Reports how the parameters of flat buffers were found.

use dcp_core::text::counted;
use std::fmt;
use std::sync::Arc;

use super::format::OptimizerFormat;
use super::join::SettingsDifference;

/// The result of the search for parameters in the flat buffers of an optimizer: found and not
/// found.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct LayoutReport {
    /// Parameters, as ranks have them, that were identified by their elements: no other of the rank's
    /// has the same.
    pub by_value: usize,
    /// Parameters with the same elements as others, identified by the order in which modules register
    /// them, which everything else in the buffers agrees with.
    pub by_order: Vec<PlacedParam>,
    /// The ways to assemble a model whose order agrees with the buffers.
    pub registrations: Vec<&'static str>,
    /// Places at which there are several parameters with the same elements, which no known order
    /// distinguishes.
    pub ambiguous: Vec<AmbiguousPlace>,
    /// Places at which something begins that is no parameter of the model.
    pub unknown: Vec<UnknownPlace>,
    /// The model's tensors whose state could not be assembled, with the reason.
    pub unresolved: Vec<(Arc<str>, String)>,
    /// The model's tensors that the buffers do not hold: they are not trained.
    pub without_state: Vec<Arc<str>>,
}

/// A parameter in a buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PlacedParam {
    /// The model's tensor.
    pub param: Arc<str>,
    /// The layer, where the tensor is of one or of several.
    pub layer: Option<u64>,
    /// The buffer, as its tensors are named.
    pub buffer: String,
    /// The bucket of the buffer.
    pub bucket: usize,
    /// Its first element in the bucket.
    pub element: u64,
}

/// A place in a buffer that belongs to one of several parameters.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct AmbiguousPlace {
    /// The buffer, as its tensors are named.
    pub buffer: String,
    /// The bucket of the buffer.
    pub bucket: usize,
    /// The first element.
    pub element: u64,
    /// The number of elements.
    pub elements: u64,
    /// The model's tensors that it may be of, and the layer, where there is one.
    pub candidates: Vec<(Arc<str>, Option<u64>)>,
}

/// A place in a buffer at which no parameter of the model was found.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct UnknownPlace {
    /// The buffer, as its tensors are named.
    pub buffer: String,
    /// The bucket of the buffer.
    pub bucket: usize,
    /// The first element.
    pub element: u64,
    /// The reason why nothing was found.
    pub problem: &'static str,
}

impl LayoutReport {
    /// Whether every parameter was found.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.ambiguous.is_empty() && self.unknown.is_empty() && self.unresolved.is_empty()
    }

    /// Returns the problems that prevent the view by parameter, one sentence for each; empty when
    /// there are none.
    #[must_use]
    pub fn problems(&self) -> Vec<String> {
        const NAMED: usize = 4;
        let ambiguous = self.ambiguous.iter().map(|place| {
            let name = |(name, layer): &(Arc<str>, Option<u64>)| match layer {
                Some(layer) => format!("{name} (layer {layer})"),
                None => name.to_string(),
            };
            let names: Vec<_> = place.candidates.iter().take(NAMED).map(name).collect();
            let more = place.candidates.len().saturating_sub(NAMED);
            let more = if more > 0 { format!(" or {more} more") } else { String::new() };
            format!(
                "{}, bucket {}, elements {} to {}: these are master parameters of {}{more}, which \
                 have the same weights, and whose order is not known",
                place.buffer,
                place.bucket,
                place.element,
                place.element.saturating_add(place.elements),
                names.join(" or of "),
            )
        });
        let unknown = self.unknown.iter().map(|place| {
            let UnknownPlace { buffer, bucket, element, problem } = place;
            format!("{buffer}, bucket {bucket}, element {element}: {problem}")
        });
        let unresolved = self.unresolved.iter().map(|(fqn, problem)| format!("{fqn}: {problem}"));
        ambiguous.chain(unknown).chain(unresolved).collect()
    }
}

/// The result of a view of a checkpoint's optimizer state by parameter.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct PerParameterReport {
    /// The format that it is stored in.
    pub from: OptimizerFormat,
    /// Tensors of the model whose state is shown.
    pub params: usize,
    /// The result of the search for the parameters, where the format does not name them.
    pub layout: Option<LayoutReport>,
    /// The groups of ranks that have other settings than the first, which is used for all: learning
    /// rates, steps, the scale of gradients. Parameter groups that only some of them have are all
    /// kept.
    pub differing: Vec<SettingsDifference>,
}

impl PerParameterReport {
    /// Whether all of the state is shown by parameter.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.layout.as_ref().is_none_or(LayoutReport::is_complete)
    }
}

impl fmt::Display for PerParameterReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.from, counted(self.params as u64, "parameter"))?;
        let Some(layout) = &self.layout else { return Ok(()) };
        write!(f, ", {} identified by value", layout.by_value)?;
        if !layout.by_order.is_empty() {
            let ways = layout.registrations.join(" or ");
            write!(f, ", {} by the order of {ways}", layout.by_order.len())?;
        }
        let open = layout.problems().len();
        if open > 0 {
            write!(f, ", {open} places unknown")?;
        }
        Ok(())
    }
}

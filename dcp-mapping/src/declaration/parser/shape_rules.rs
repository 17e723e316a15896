//! Shapes of tensors in a declaration, as settings of `config.json`.

use std::ops::Range;

use toml::Spanned;

use super::Reader;
use crate::error::MappingError;
use crate::layout::Op;
use crate::mapping::{ConfigRules, Rule};

impl Reader<'_> {
    /// The shape of a rule's tensor: for each axis the settings whose product it is, such as
    /// `"num_attention_heads * head_dim"`.
    pub(super) fn shape(
        &self,
        shape: Option<&Spanned<Vec<String>>>,
        op: &Op,
        transpose: bool,
    ) -> Result<Vec<Vec<String>>, MappingError> {
        let Some(shape) = shape else { return Ok(Vec::new()) };
        if transpose || !matches!(op, Op::Copy | Op::Rotary(_)) {
            let problem = "a shape is that of one tensor, the same on both sides";
            return Err(self.error(&shape.span(), problem));
        }
        let settings = |axis: &String| axis.split('*').map(|one| one.trim().to_owned()).collect();
        Ok(shape.get_ref().iter().map(settings).collect())
    }

    /// Refuses shapes of settings that `[config.fields]` does not have.
    pub(super) fn check_shapes<'a>(
        &self,
        rules: impl Iterator<Item = (&'a Rule, &'a Range<usize>)>,
        config: &ConfigRules,
    ) -> Result<(), MappingError> {
        for (rule, span) in rules {
            let mut settings = rule.shape.iter().flatten();
            if let Some(unknown) = settings.find(|one| !config.fields.contains_key(*one)) {
                let problem = format!("its shape has {unknown:?}, which [config.fields] lacks");
                return Err(self.error(span, problem));
            }
        }
        Ok(())
    }
}

//! Model facts: the numbers that a mapping needs, named like Megatron's arguments.

use serde_json::{Map, Value};

use crate::error::MappingError;

/// The facts of a model: names of Megatron's arguments, and their values.
///
/// They come from a checkpoint's `args` ([`from_args`](Self::from_args)), from a transformers
/// `config.json` ([`Mapping::facts_of_config`](crate::Mapping::facts_of_config)), or one by one.
/// Missing facts are derived from shapes where possible.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Facts {
    values: Map<String, Value>,
    padding: Padding,
    /// Whether `vocab_size` is what the model is opened with, rather than an argument that may
    /// have counted for nothing.
    vocabulary_is_sure: bool,
}

/// To what a vocabulary is padded on the way to Megatron.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Padding {
    /// To the next multiple of `divisor × tensor_parallel` rows, as Megatron's
    /// `--make-vocab-size-divisible-by` does it.
    Multiple {
        /// `--make-vocab-size-divisible-by`.
        divisor: u64,
        /// The tensor parallel size.
        tensor_parallel: u64,
    },
    /// To so many rows.
    Exactly(u64),
}

impl Padding {
    /// The rows of a vocabulary of `tokens`, unless they are too many to count.
    fn rows(self, tokens: u64) -> Option<u64> {
        match self {
            Self::Exactly(rows) => Some(rows),
            Self::Multiple { divisor, tensor_parallel } => {
                let multiple = divisor.max(1).checked_mul(tensor_parallel.max(1))?;
                tokens.checked_next_multiple_of(multiple)
            }
        }
    }
}

impl Default for Padding {
    /// Megatron's: 128 without tensor parallelism.
    fn default() -> Self {
        Self::Multiple { divisor: 128, tensor_parallel: 1 }
    }
}

impl Facts {
    /// Facts from shapes alone.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The arguments of a Megatron run, as plain data. `num_query_groups` means nothing when
    /// `group_query_attention` is off: then every head is a group of its own.
    #[must_use]
    pub fn from_args(mut args: Map<String, Value>) -> Self {
        args.retain(|_, value| !value.is_null());
        if args.get("group_query_attention") == Some(&Value::Bool(false)) {
            args.remove("num_query_groups");
            if let Some(heads) = args.get("num_attention_heads").cloned() {
                args.insert("num_query_groups".to_owned(), heads);
            }
        }
        // This tokenizer has a token more than the argument says: that for the end of a document.
        if args.get("tokenizer_type").and_then(Value::as_str) == Some("NullTokenizer")
            && let Some(size) = args.get("vocab_size").and_then(Value::as_u64)
        {
            args.insert("vocab_size".to_owned(), size.saturating_add(1).into());
        }
        Self { values: args, ..Self::default() }
    }

    /// Adds a value, or replaces one.
    #[must_use]
    pub fn with(mut self, name: impl Into<String>, value: impl Into<Value>) -> Self {
        self.set(name, value);
        self
    }

    /// The padding of the vocabulary.
    #[must_use]
    pub fn padding(&self) -> &Padding {
        &self.padding
    }

    /// Sets the padding of the vocabulary.
    #[must_use]
    pub fn with_padding(mut self, padding: Padding) -> Self {
        self.padding = padding;
        self
    }

    /// Sets a value; `null` removes it.
    pub fn set(&mut self, name: impl Into<String>, value: impl Into<Value>) {
        match value.into() {
            Value::Null => _ = self.values.remove(&name.into()),
            value => _ = self.values.insert(name.into(), value),
        }
    }

    /// Sets a value that is not there yet.
    pub(crate) fn complete(&mut self, name: &str, value: impl Into<Value>) {
        if !self.values.contains_key(name) {
            self.set(name, value);
        }
    }

    /// Completes the facts of a model that will be opened with a given `config.json`, of which
    /// `config` are the facts: the vocabulary has as many tokens as it says, and it has the other
    /// missing facts.
    ///
    /// # Errors
    ///
    /// [`MappingError::BadFact`] when it is the configuration of another model: where both state how
    /// the model computes, they must agree, and no token that the arguments count may be
    /// missing.
    pub fn described_by(mut self, config: &Self) -> Result<Self, MappingError> {
        for (name, other) in config.values() {
            if let Some(own) = self.get(name)
                && self.has_to_agree(name, other, config)
                && !same(own, other)
            {
                let problem = format!("config.json says {other}, so it is that of another model");
                return Err(bad(name, own, &problem));
            }
        }
        if let Some(tokens) = config.vocab_size()? {
            if let Some(own) = self.vocab_size()?.filter(|own| *own > tokens) {
                let problem = format!("config.json says {tokens}, which would cut off tokens");
                return Err(bad("vocab_size", &own.into(), &problem));
            }
            self.set("vocab_size", tokens);
            self.vocabulary_is_sure = true;
        }
        for (name, value) in config.values() {
            self.complete(name, value.clone());
        }
        Ok(self)
    }

    /// Whether a fact must be the same in `config`.
    fn has_to_agree(&self, name: &str, value: &Value, config: &Self) -> bool {
        let is = |name: &str, value: &str| config.get(name).and_then(Value::as_str) == Some(value);
        match name {
            // How long sequences are in training, and what only training looks at.
            "seq_length" | "moe_aux_loss_coeff" => false,
            "max_position_embeddings" => is("position_embedding_type", "learned_absolute"),
            "vocab_size" | "padded_vocab_size" => false,
            // The width of layers without experts, of which there may be none.
            "ffn_hidden_size" => [self, config].iter().all(|f| f.get("num_experts").is_none()),
            "untie_embeddings_and_output_weights" | "use_rope_scaling" | "add_qkv_bias" => true,
            "moe_router_pre_softmax" => !is("moe_router_score_function", "sigmoid"),
            // Other switches and names are the family's, not of a configuration.
            _ => value.is_number() || value.is_array(),
        }
    }

    /// Forgets a size of the vocabulary that an embedding of `rows` rows does not confirm.
    /// Megatron-LM reads the argument only where its tokenizer has no size, so it may be
    /// anything; its padding, which is among its arguments, does.
    pub(crate) fn doubt_vocabulary(&mut self, rows: u64) -> Result<(), MappingError> {
        let (Some(tokens), Some(divisor)) =
            (self.vocab_size()?, self.get_u64("make_vocab_size_divisible_by")?)
        else {
            return Ok(());
        };
        let tensor_parallel = self.get_u64("tensor_model_parallel_size")?.unwrap_or(1);
        let padding = Padding::Multiple { divisor, tensor_parallel };
        if !self.vocabulary_is_sure && tokens != rows && padding.rows(tokens) != Some(rows) {
            self.set("vocab_size", Value::Null);
        }
        Ok(())
    }

    /// A value.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&Value> {
        self.values.get(name)
    }

    /// All values.
    #[must_use]
    pub fn values(&self) -> &Map<String, Value> {
        &self.values
    }

    /// A size.
    ///
    /// # Errors
    ///
    /// [`MappingError::BadFact`] when it is something else than a size.
    pub fn get_u64(&self, name: &str) -> Result<Option<u64>, MappingError> {
        let Some(value) = self.values.get(name) else { return Ok(None) };
        match value.as_u64() {
            Some(number) => Ok(Some(number)),
            None => Err(bad(name, value, "it must be a whole number from 0")),
        }
    }

    /// A size that has to be known.
    pub(crate) fn need(&self, name: &str, needed_for: &str) -> Result<u64, String> {
        match self.get_u64(name) {
            Ok(Some(number)) => Ok(number),
            Ok(None) => {
                let (fact, needed_for) = (name.to_owned(), needed_for.to_owned());
                Err(MappingError::UnknownFact { fact, needed_for }.to_string())
            }
            Err(error) => Err(error.to_string()),
        }
    }

    /// Whether something is on, where known.
    pub(crate) fn get_bool(&self, name: &str) -> Option<bool> {
        self.values.get(name)?.as_bool()
    }

    /// The number of groups that query heads come in: `num_query_groups`, by default every head
    /// has its own.
    pub(crate) fn query_groups(&self, heads: u64) -> Result<u64, MappingError> {
        let groups = self.get_u64("num_query_groups")?.unwrap_or(heads);
        if groups == 0 {
            return Err(bad("num_query_groups", &Value::from(0), "there must be one at least"));
        }
        Ok(groups)
    }

    /// The tokens of the vocabulary, without padding, where known.
    pub(crate) fn vocab_size(&self) -> Result<Option<u64>, MappingError> {
        self.get_u64("vocab_size")
    }

    /// The rows that a vocabulary of `tokens` is padded to.
    pub(crate) fn padded_vocab_size(&self, tokens: u64) -> Result<u64, MappingError> {
        let rows = self.padding.rows(tokens);
        rows.ok_or_else(|| bad("vocab_size", &tokens.into(), "padded it is too large"))
    }
}

/// Whether two values say the same; `10000` and `10000.0` do.
fn same(one: &Value, other: &Value) -> bool {
    match (one, other) {
        (Value::Number(one), Value::Number(other)) => {
            one == other || one.as_f64().is_some_and(|one| other.as_f64() == Some(one))
        }
        (Value::Array(one), Value::Array(other)) => {
            one.len() == other.len() && one.iter().zip(other).all(|(one, other)| same(one, other))
        }
        _ => one == other,
    }
}

pub(crate) fn bad(name: &str, value: &Value, problem: &str) -> MappingError {
    let (fact, value) = (name.to_owned(), value.to_string());
    MappingError::BadFact { fact, value, problem: problem.to_owned() }
}

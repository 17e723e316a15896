//! Declarative mappings of model weights between naming schemes, such as Megatron-Core's and
//! Hugging Face's, as streaming views of a checkpoint.

//! Files of `torch.save`: what real PyTorch wrote is read bit for bit, what is written here is
//! what PyTorch would have written, and hostile files do no harm.

mod fixtures;
mod hostile;
mod reading;
mod regions;
mod rewrite;
mod writing;

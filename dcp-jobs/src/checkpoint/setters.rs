//! Options that all builders of jobs have.

/// The setter of a job's use of the machine.
macro_rules! job_options {
    () => {
        /// Sets how the job uses the machine: memory, reads in flight, progress, what Python may run.
        pub fn job(mut self, options: crate::options::JobOptions) -> Self {
            self.job = options;
            self
        }
    };
}

/// The setters of the place that a job writes, for builders with a `destination`.
macro_rules! destination_options {
    () => {
        /// Whether nothing is written, so that the report says what would be.
        pub fn dry_run(mut self, dry_run: bool) -> Self {
            self.job.dry_run = dry_run;
            self
        }

        /// Replaces a target of the same format; until the new one is complete, the old one stays.
        pub fn overwrite(mut self, overwrite: bool) -> Self {
            self.destination = self.destination.overwrite(overwrite);
            self
        }

        /// Records what is created in `rollback`.
        pub fn rollback(mut self, rollback: &crate::rollback::Rollback) -> Self {
            self.destination = self.destination.rollback(rollback);
            self
        }

        /// Passes options on to the framework or the mapping that takes this type.
        pub fn with<T: crate::checkpoint::framework::FrameworkOptions>(
            mut self,
            options: T,
        ) -> Self {
            self.destination = self.destination.with(options);
            self
        }

        /// Writes only these keys, under these names.
        pub fn keys(mut self, keys: crate::checkpoint::chosen_keys::Keys) -> Self {
            self.keys = keys;
            self
        }
    };
}

/// As what the job writes, for builders with a `destination` of any format.
macro_rules! format_options {
    () => {
        /// Writes this format; by default the one that the name of the target says.
        pub fn to(mut self, format: impl Into<Option<crate::checkpoint::format::Format>>) -> Self {
            self.destination = self.destination.to(format);
            self
        }

        /// Casts floats to this dtype, as [`cast_to`](crate::cast_to) says of each.
        pub fn dtype(mut self, dtype: impl Into<Option<dcp_core::DType>>) -> Self {
            self.destination = self.destination.dtype(dtype);
            self
        }
    };
}

pub(crate) use {destination_options, format_options, job_options};

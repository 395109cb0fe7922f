"""What users write: the job spec and the policy, validated and normalised."""

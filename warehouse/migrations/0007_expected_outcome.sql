-- A cell that its own prediction refuses is expected to be infeasible: that is stored, not guessed.
COMMENT ON COLUMN run.expect IS 'outcome that counts as success: as asked, or infeasible where the run''s own prediction refuses it; NULL: ok [-; asked]';
COMMENT ON COLUMN runs_wide.expect IS 'outcome that counts as success: as asked, or infeasible where the run''s own prediction refuses it; NULL: ok [-; asked]';

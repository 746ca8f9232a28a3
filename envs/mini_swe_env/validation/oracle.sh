#!/bin/sh
# Solves task eval/0 of the generated tasks, the default of the server; run in its work folder.
sed -i 's|return cost + step|return cost // step|' yard.py
